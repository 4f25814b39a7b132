"""How the members on one host come to share a file that has no name, and to notice each other's end.

Theory of operation
-------------------
Every member listens on an abstract Unix socket, whose random name it gives away in the store, together with a
secret; each connects to all before it. The first member sends its anonymous file over these connections. They stay
open and carry nothing more: a connection that closes is a member that is gone. Nothing of this has a name in a
file system, so nothing can be left over.
"""

from __future__ import annotations

import array
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

_HELLO = struct.Struct("=16sI")
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end: its number, user and group
_ANSWER_WITHIN_S = 5.0


def host_key() -> str:
    """Equal where an abstract socket can reach: one boot of one machine, one network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Door:
    """Where this member can be reached by its neighbours, until all have come."""

    listener: socket.socket
    name: str
    secret: str


def open_door() -> Door:
    name = f"ddp-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return Door(listener, name, secrets.token_hex(16))


@dataclass(slots=True)
class Neighbourhood:
    """The shared file, and a connection to each other member; none to itself."""

    file: int
    connections: list[socket.socket | None]

    def sockets(self) -> list[int]:
        return [-1 if each is None else each.fileno() for each in self.connections]

    def hand_over(self) -> None:
        """The core owns the connections from now on, and has a file descriptor of its own."""
        os.close(self.file)
        for each in self.connections:
            if each is not None:
                each.detach()

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        for each in self.connections:
            if each is not None:
                each.close()


def anonymous_file(length: int) -> int:
    file = os.memfd_create("ddp-shm", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, length)
    except OSError:
        os.close(file)
        raise
    return file


def meet(
    door: Door, doors: list[tuple[str, str]], member: int, length: int, timeout_s: float
) -> Neighbourhood:
    """`doors`: name and secret of every member, in order."""
    deadline = time.monotonic() + timeout_s
    neighbours = Neighbourhood(-1, [None] * len(doors))
    try:
        if member == 0:
            neighbours.file = anonymous_file(length)
        for other, (name, secret) in enumerate(doors[:member]):
            neighbours.connections[other] = _knock(name, secret, member, deadline)
        while any(each is None for each in neighbours.connections[member + 1 :]):
            _admit(door, neighbours, member, deadline)
        if member:
            neighbours.file = _receive_file(neighbours.connections[0], deadline)
    except OSError:
        neighbours.close()
        raise
    return neighbours


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not all members on this host have come")
    return left


def _knock(name: str, secret: str, member: int, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left(deadline))
        connection.connect(f"\0{name}")
        if not _is_of_this_user(connection):
            raise PermissionError(f"another user listens as {name}")
        connection.sendall(_HELLO.pack(bytes.fromhex(secret), member))
    except OSError:
        connection.close()
        raise
    return connection


def _is_of_this_user(connection: socket.socket) -> bool:
    """An abstract socket has no owner and no mode: whoever guesses its name reaches it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()


def _admit(door: Door, neighbours: Neighbourhood, member: int, deadline: float) -> None:
    """Lets one in, if it knows the secret and is somebody who is still missing."""
    door.listener.settimeout(_left(deadline))
    connection, _ = door.listener.accept()
    other = read_hello(connection, door.secret) if _is_of_this_user(connection) else None
    missing = other is not None and member < other < len(neighbours.connections)
    if other is None or not missing or neighbours.connections[other] is not None:
        connection.close()
        return
    neighbours.connections[other] = connection
    if member == 0:
        socket.send_fds(connection, [b"f"], [neighbours.file])


def read_hello(connection: socket.socket, secret: str) -> int | None:
    """Who is there; None for a stranger, or one that does not say within seconds."""
    connection.settimeout(_ANSWER_WITHIN_S)
    said = b""
    try:
        while len(said) < _HELLO.size and (more := connection.recv(_HELLO.size - len(said))):
            said += more
    except OSError:
        return None
    if len(said) < _HELLO.size:
        return None
    token, who = _HELLO.unpack(said)
    return int(who) if hmac.compare_digest(token, bytes.fromhex(secret)) else None


def hello(secret: str, who: int) -> bytes:
    return _HELLO.pack(bytes.fromhex(secret), who)


def _receive_file(connection: socket.socket | None, deadline: float) -> int:
    assert connection is not None
    connection.settimeout(_left(deadline))
    size = array.array("i").itemsize
    word, ancillary, _flags, _address = connection.recvmsg(
        1, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
    )
    if not word or not ancillary:
        raise ConnectionError("the first member on this host could not share its memory")
    return int(array.array("i", ancillary[0][2][:size])[0])
