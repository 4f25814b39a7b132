"""The TCP connections of a ring of hosts.

A leader of each host connects to the leader of the next host, and accepts the connection from the previous host.

A connecting rank sends a secret that only members of the job can read in the store. Other connections are closed.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddp.groups.segment import accept, hello, read_hello


@dataclass(frozen=True, slots=True)
class Port:
    """The listening socket of this leader, and the secret of a valid connection."""

    socket: socket.socket
    address: str
    secret: str

    @property
    def number(self) -> int:
        return int(self.socket.getsockname()[1])


def open_port() -> Port:
    address = own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(16)
    return Port(listener, address, secrets.token_hex(16))


def own_address() -> str:
    """The address of the interface in GLOO_SOCKET_IFNAME, else the one on the route to the master."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return _address_of(interface)
    master = os.environ.get("MASTER_ADDR", "")
    for candidate in (master, socket.gethostname()):
        if candidate and (address := source_address(candidate)):
            return address
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface (SIOCGIFADDR)."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), 0x8915, request)
        except OSError as error:
            raise OSError(
                f"invalid GLOO_SOCKET_IFNAME={interface}: {error.strerror}. Use an interface that `ip addr` lists"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def source_address(target: str) -> str:
    """Return the local address that the kernel uses for packets to the target. Sends no packet."""
    try:
        candidates = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _name, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


@dataclass(slots=True)
class RingLinks:
    """The connections to the next and the previous host."""

    following: socket.socket
    previous: socket.socket

    def sockets(self) -> tuple[int, int]:
        return self.following.fileno(), self.previous.fileno()

    def hand_over(self) -> None:
        self.following.detach()
        self.previous.detach()

    def close(self) -> None:
        self.following.close()
        self.previous.close()


def join(
    port: Port,
    me: int,
    following: tuple[str, int, str],
    previous: int,
    timeout_s: float,
    interrupted: Callable[[], str] = str,
) -> RingLinks:
    """Connect to the next host and accept the previous one.

    `following`: address, port and secret of the next leader; `previous`: the rank that connects to this one;
    `interrupted` returns why this process must not wait any longer, or "".
    """
    address, number, secret = following
    deadline = time.monotonic() + timeout_s
    ahead = socket.create_connection((address, number), timeout=timeout_s)
    try:
        ahead.sendall(hello(secret, me))
        behind = _expect(port, previous, deadline, interrupted)
    except OSError:
        ahead.close()
        raise
    for each in (ahead, behind):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return RingLinks(ahead, behind)


def _expect(port: Port, previous: int, deadline: float, interrupted: Callable[[], str]) -> socket.socket:
    while (connection := accept(port.socket, deadline, interrupted)) is not None:
        if read_hello(connection, port.secret) == previous:
            return connection
        connection.close()
    raise TimeoutError(
        f"rank {previous} did not connect to {port.address}:{port.number} in time. Check the firewall, or set "
        "GLOO_SOCKET_IFNAME to an interface that all hosts can reach"
    )
