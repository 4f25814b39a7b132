"""Connections without credentials that do nothing, or nothing useful: jobs, users and probes are served beside them."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
from typing import TYPE_CHECKING

import psutil
import pytest
from served import Service, soon
from test_service_under_fire import a_job_runs

from rendezvous.service.connections import surplus, too_busy
from rendezvous.service.server import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_RESET = b"\0\0\0\x08"


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def _field(name: str, value: str) -> bytes:
    """A header of HTTP/2, without compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


_CALL = b"".join(
    _field(*pair)
    for pair in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Watch"),
        (":authority", "a"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)


def _streams(until: int) -> bytes:
    """Calls with one empty request each, that are not closed."""
    return b"".join(_frame(1, 4, n, _CALL) + _frame(0, 1, n, bytes(5)) for n in range(1, until, 2))


_KINDS = {
    "silent": b"",
    "slow header": b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ",
    "slow body": b"POST /api/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    "half a preface": _PREFACE[:10],
    "no stream": _PREFACE + _SETTINGS,
    "many settings": _PREFACE + _SETTINGS * 2000,
    "no protocol": b"\x16\x03\x01 nothing that any of the ports speaks\r\n",
    "half a header": _PREFACE + _SETTINGS + _frame(1, 0, 1, _CALL[:40]),
    "endless header": _PREFACE
    + _SETTINGS
    + _frame(1, 0, 1, _CALL)
    + _frame(9, 0, 1, _field("x", "y" * 99)) * 1000,
    "half streams": _PREFACE + _SETTINGS + b"".join(_frame(1, 4, n, _CALL) for n in range(1, 999, 2)),
    "streams without an end": _PREFACE + _SETTINGS + _streams(999),
    "no window": _PREFACE + _frame(4, 0, 0, b"\0\4\0\0\0\0") + _streams(999),
    "pings": _PREFACE + _SETTINGS + _frame(6, 0, 0, bytes(8)) * 2000,
    "priorities": _PREFACE + _SETTINGS + _frame(2, 0, 1, b"\0\0\0\0\x10") * 2000,
    "window updates": _PREFACE + _SETTINGS + _frame(8, 0, 0, b"\0\0\0\1") * 2000,
    "reset streams": _PREFACE
    + _SETTINGS
    + b"".join(_frame(1, 4, n, _CALL) + _frame(3, 0, n, _RESET) for n in range(1, 99, 2)),
}


class Ports(Service):
    def __init__(self, descriptors: int) -> None:
        places = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--web", "127.0.0.1:0")
        super().__init__(*places, descriptors=descriptors)
        self.http = self.await_line(r"metrics at (\S+)")[1]
        self.web = self.await_line(r"page at http://([^/]+)/")[1]
        self.await_endpoint()
        self.jobs = 0

    def check_others(self) -> None:
        """A job runs, a probe and a user of the page are answered."""
        self.jobs += 1
        assert soon(a_job_runs(self, f"beside-{self.jobs}")) < 25.0
        for where, path in ((self.http, "/livez"), (self.web, "/")):
            connection = http.client.HTTPConnection(where, timeout=60)
            connection.request("GET", path)
            assert connection.getresponse().status == 200
            connection.close()


@contextlib.contextmanager
def flooded(service: Ports, where: str, count: int, first: bytes) -> Iterator[None]:
    host, _, port = where.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((host, int(port)), 60))
            with contextlib.suppress(OSError):
                client.sendall(first)
        yield


def check_flood(service: Ports, where: str, count: int, first: bytes, descriptors: int) -> None:
    process = psutil.Process(service.pid)
    before, cpu = service.resident, sum(process.cpu_times()[:2])
    with flooded(service, where, count, first):
        service.check_others()
        assert process.num_fds() < descriptors
        assert service.resident - before < 200 * 2**20
    assert sum(process.cpu_times()[:2]) - cpu < 5.0
    assert sum(map(len, service.log)) < 100_000
    service.check_others()


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("port", ["web", "endpoint"])
def test_idle_connections_leave_descriptors_and_places_for_jobs(many_files: None, port: str) -> None:
    service = Ports(200)
    try:
        check_flood(service, getattr(service, port), 300, b"", 200)
    finally:
        service.close()


@pytest.mark.nightly(
    instead=("::test_idle_connections_leave_descriptors_and_places_for_jobs", "shell/test_listener.py")
)
@pytest.mark.parametrize("descriptors", [600, 1 << 14])
@pytest.mark.parametrize("port", ["web", "http", "endpoint"])
@pytest.mark.parametrize("kind", _KINDS)
def test_floods_of_each_kind_on_each_port(many_files: None, port: str, kind: str, descriptors: int) -> None:
    service = Ports(descriptors)
    try:
        check_flood(service, getattr(service, port), 1400, _KINDS[kind], descriptors)
    finally:
        service.close()


def test_of_strangers_those_end_whose_address_has_most() -> None:
    flood = [("10.0.0.1", port) for port in range(70)]
    others = [("10.0.0.2", 1), ("10.0.0.3", 1)]
    assert surplus([*others, *flood], 100) == []
    assert (
        surplus(
            [*others, *flood, ("10.0.0.1", 70), ("10.0.0.1", 71), ("10.0.0.1", 72), ("10.0.0.1", 73)], 100
        )
        == flood[:26]
    )


def test_the_addresses_of_one_ipv6_network_count_as_one() -> None:
    flood = [(f"2001:db8::{n:x}", 1) for n in range(80)]
    honest = ("2001:db8:0:1::1", 1)
    ended = surplus([honest, *flood], 100)
    assert len(ended) == 31
    assert honest not in ended


def test_only_strangers_that_call_more_than_probes_end() -> None:
    probes = {("10.0.0.1", port): 2 for port in range(300)}
    assert too_busy(probes) == set()
    assert too_busy(probes | {("10.0.0.1", 999): 20, ("10.0.0.2", 1): 150}) == {("10.0.0.1", 999)}


def test_what_a_client_sends_is_not_in_the_log() -> None:
    """gRPC would write the data of a GOAWAY frame as they are: control characters, and lines that look like ours."""
    data = bytes(4) + (11).to_bytes(4, "big") + b"\xff\x1b[31m\n2026-01-01 info: forged\n"
    goaway = len(data).to_bytes(3, "big") + b"\x07\0\0\0\0\0" + data
    service = Ports(1 << 12)
    host, _, port = service.endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 60) as client:
            client.sendall(_PREFACE + _SETTINGS + goaway + b"\0\0\x08\x06\0\0\0\0\0answered")
            received = b""
            while b"\x06\x01\0\0\0\0answered" not in received:  # it has read all before this ping
                received += client.recv(4096)
        service.end()
        assert "forged" not in "".join(service.log)
    finally:
        service.close()
