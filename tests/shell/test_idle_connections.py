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

from rendezvous.service.server import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_FIRST_BYTES = {
    "silent": b"",
    "slow header": b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ",
    "slow body": b"POST /api/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    "half a preface": _PREFACE[:10],
    "no stream": _PREFACE + _SETTINGS,
    "many settings": _PREFACE + _SETTINGS * 2000,
    "no protocol": b"\x16\x03\x01 nothing that any of the ports speaks\r\n",
}


class Ports(Service):
    def __init__(self, descriptors: int) -> None:
        super().__init__("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--web", "127.0.0.1:0")
        self.http = self.await_line(r"metrics at (\S+)")[1]
        self.web = self.await_line(r"page at http://([^/]+)/")[1]
        self.await_endpoint()
        self.jobs = 0
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))

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


def test_idle_connections_to_the_page_leave_descriptors_for_jobs(many_files: None) -> None:
    service = Ports(1 << 12)
    # What was set at the start stays set: the limit is lowered to what the places leave, and 50.
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (150, 1 << 12))
    try:
        check_flood(service, service.web, 300, b"", 150)
    finally:
        service.close()


@pytest.mark.nightly(
    instead=("::test_idle_connections_to_the_page_leave_descriptors_for_jobs", "shell/test_listener.py")
)
@pytest.mark.parametrize("port", ["web", "http", "endpoint"])
@pytest.mark.parametrize("kind", _FIRST_BYTES)
def test_floods_of_each_kind_on_each_port(many_files: None, port: str, kind: str) -> None:
    service = Ports(1 << 14)
    try:
        check_flood(service, getattr(service, port), 1400, _FIRST_BYTES[kind], 1 << 14)
    finally:
        service.close()


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
