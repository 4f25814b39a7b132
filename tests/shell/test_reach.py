"""What this host can tell of addresses, asked of the real kernel."""

from __future__ import annotations

import socket

import pytest

from launcher import reach


@pytest.mark.parametrize("address", ["127.0.0.1", "127.5.6.7"])
def test_loopback_is_our_own(address: str) -> None:
    assert reach.is_own(socket.AF_INET, address)
    assert reach.own_address_of(address, 1) == address


@pytest.mark.parametrize("address", ["192.0.2.7", "203.0.113.9"])
def test_an_address_for_documentation_is_nobodys(address: str) -> None:
    assert not reach.is_own(socket.AF_INET, address)
    assert reach.own_address_of(address, 1) == ""


def test_a_name_that_nobody_knows_has_no_address() -> None:
    assert reach.own_address_of("no-such-host.invalid", 1) == ""
    assert reach.source_address("no-such-host.invalid", 1) == ""


def test_packets_to_loopback_leave_from_loopback() -> None:
    assert reach.is_loopback(reach.source_address("127.0.0.1", 9))


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not reach.is_free("127.0.0.1", port)
    assert reach.is_free("127.0.0.1", port)
