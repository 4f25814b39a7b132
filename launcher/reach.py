"""What this host can say of addresses: whether one is its own, and from which of them it reaches another."""

from __future__ import annotations

import errno
import socket


def addresses_of(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Every address the name stands for, in the resolver's order; none for a name nobody knows."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_own(family: socket.AddressFamily, address: str) -> bool:
    """The kernel lets a socket be bound to the host's own addresses only: aliases, IPv6 and every NIC included."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
    return True


def is_free(address: str, port: int) -> bool:
    """Nobody listens there; gRPC would find out too, but complains on stderr."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def own_address_of(host: str, port: int) -> str:
    """The address of ours that `host` stands for; "" when it is another machine's."""
    return next((address for family, address in addresses_of(host, port) if is_own(family, address)), "")


def outward_address() -> str:
    """The address of ours that the default route leaves from; "" where there is none. Nothing is sent."""
    return source_address("192.0.2.1", 9)  # kept for documentation: nobody's


def source_address(host: str, port: int) -> str:
    """From which of our addresses packets to `host` leave, by the routing table; "" without a route."""
    for family, address in addresses_of(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))  # sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""
