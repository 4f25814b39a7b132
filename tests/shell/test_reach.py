"""What this host can tell of addresses, asked of the real kernel."""

from __future__ import annotations

import asyncio
import socket

import pytest
from ports import free_port

from launcher.joining import addresses


@pytest.mark.parametrize("address", ["127.0.0.1", "127.5.6.7"])
def test_loopback_is_our_own(address: str) -> None:
    assert addresses.is_own(socket.AF_INET, address)
    assert addresses.own_address_of(address, 1) == address


@pytest.mark.parametrize("address", ["192.0.2.7", "203.0.113.9"])
def test_an_address_for_documentation_is_nobodys(address: str) -> None:
    assert not addresses.is_own(socket.AF_INET, address)
    assert addresses.own_address_of(address, 1) == ""


def test_a_name_that_nobody_knows_has_no_address() -> None:
    assert addresses.own_address_of("no-such-host.invalid", 1) == ""
    assert addresses.source_address("no-such-host.invalid", 1) == ""


def test_packets_to_loopback_leave_from_loopback() -> None:
    assert addresses.is_loopback(addresses.source_address("127.0.0.1", 9))


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert not addresses.is_free("127.0.0.1", port)
    assert addresses.is_free("127.0.0.1", port)


def test_an_interface_has_an_address_and_an_unknown_one_has_none() -> None:
    assert addresses.address_of_interface("lo") == "127.0.0.1"
    assert addresses.address_of_interface("nosuch0") == ""
    assert "lo" in addresses.interfaces()


def obstacle(port: int, *, listens: bool, within_s: float = 1.0) -> str:
    return asyncio.run(addresses.obstacle_to("127.0.0.1", port, listens=listens, within_s=within_s))


def test_whoever_listens_is_reached_and_a_refusal_is_an_answer_only_where_nobody_listens_yet() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert obstacle(port, listens=True, within_s=60.0) == ""
    assert obstacle(port, listens=True) == "connection refused"
    assert obstacle(port, listens=False, within_s=60.0) == ""


def test_one_who_never_answers_is_waited_for_and_no_longer() -> None:
    """A full queue of connections: the kernel drops what comes, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = int(server.getsockname()[1])
        filling = [socket.socket() for _ in range(4)]
        for each in filling:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        assert obstacle(port, listens=True, within_s=0.3) == "no answer within 0.3 s"
        for each in filling:
            each.close()
