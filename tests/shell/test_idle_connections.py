"""Connections without credentials that do nothing, or nothing useful: jobs, users and probes are served beside them."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
from attackers import KINDS, PREFACE, SETTINGS
from served import Service, soon
from test_service_under_fire import a_job_runs

from rendezvous.service.connections import Peer, Sent, peer_of, surplus, too_busy
from rendezvous.service.server import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator


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
@pytest.mark.parametrize("kind", KINDS)
def test_floods_of_each_kind_on_each_port(many_files: None, port: str, kind: str, descriptors: int) -> None:
    service = Ports(descriptors)
    try:
        check_flood(service, getattr(service, port), 1400, KINDS[kind].first, descriptors)
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


def test_a_link_local_agent_is_known_whatever_the_name_of_its_interface() -> None:
    assert peer_of(SimpleNamespace(peer=lambda: "ipv6:%5Bfe80::1%252%5D:7")) == ("fe80::1", 7)


def test_only_strangers_that_call_more_than_probes_end() -> None:
    probes = {("10.0.0.1", port): 2 for port in range(300)}
    assert too_busy(probes) == set()
    assert too_busy(probes | {("10.0.0.1", 999): 20, ("10.0.0.2", 1): 150}) == {("10.0.0.1", 999)}


def test_a_client_that_sends_on_and_on_is_muted() -> None:
    service = Ports(1 << 12)
    host, _, port = service.endpoint.rpartition(":")
    try:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(20)
            ]
            for client in clients:
                client.sendall(PREFACE)
                client.setblocking(False)
            while not any("too much data without credentials" in line for line in service.log):
                for client in clients:
                    with contextlib.suppress(OSError):
                        client.send(SETTINGS * 200)
                        client.recv(1 << 20)
            service.check_others()
    finally:
        service.close()


def test_only_strangers_that_still_send_are_floods() -> None:
    peer, other, kib = ("10.0.0.1", 1), ("10.0.0.1", 2), 1024
    sent = Sent()
    assert sent.floods({peer: 127 * kib}) == set()
    assert sent.floods({peer: 200 * kib, other: 1}) == set()  # the first look that finds it
    assert sent.floods({peer: 200 * kib}) == set()  # such as one long call, which waits for its answer
    assert sent.floods({peer: 203 * kib}) == {peer}


def test_strangers_may_send_less_if_they_are_many_and_more_if_they_call() -> None:
    many: list[Peer] = [("10.0.0.1", port) for port in range(1000)]
    sent = Sent()
    sent.calls[many[0]] = 10
    assert sent.floods(dict.fromkeys(many, 10 * 1024)) == set()
    assert sent.floods(dict.fromkeys(many, 13 * 1024)) == set(many[1:])


def test_what_a_client_sends_is_not_in_the_log() -> None:
    """gRPC would write the data of a GOAWAY frame as they are: control characters, and lines that look like ours."""
    data = bytes(4) + (11).to_bytes(4, "big") + b"\xff\x1b[31m\n2026-01-01 info: forged\n"
    goaway = len(data).to_bytes(3, "big") + b"\x07\0\0\0\0\0" + data
    service = Ports(1 << 12)
    host, _, port = service.endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 60) as client:
            client.sendall(PREFACE + SETTINGS + goaway + b"\0\0\x08\x06\0\0\0\0\0answered")
            received = b""
            while b"\x06\x01\0\0\0\0answered" not in received:  # it has read all before this ping
                received += client.recv(4096)
        service.end()
        assert "forged" not in "".join(service.log)
    finally:
        service.close()
