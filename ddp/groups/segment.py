"""Share an anonymous file between the members on one host, and detect when a member ends.

Theory of operation
-------------------
Every member listens on an abstract Unix socket. It publishes the random name of the socket and a secret in the store.
Each member connects to all members before it. The first member sends its anonymous file over these connections. The
connections stay open and carry no further data. If one closes, its member has ended. The file and the sockets do not
have a name in the file system, so a crash cannot leave files behind.
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
_CREDENTIALS = struct.Struct("3i")  # pid, user id and group id of the peer
_ANSWER_WITHIN_S = 5.0


def host_key() -> str:
    """Return a key that is equal for processes that can connect: same boot, network namespace and user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Door:
    """The listener of this member, which accepts neighbours until all have connected."""

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
    """The shared file, and a connection to each other member. The entry of this member is None."""

    file: int
    connections: list[socket.socket | None]

    def sockets(self) -> list[int]:
        return [-1 if each is None else each.fileno() for each in self.connections]

    def hand_over(self) -> None:
        """Release the connections, which the core now owns, and close the file, which the core has duplicated."""
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
    """Connect all members and share the file. `doors`: name and secret of every member's listener, in order."""
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
        raise TimeoutError("not all ranks on this host connected in time. See the logs of the other ranks")
    return left


def _knock(name: str, secret: str, member: int, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left(deadline))
        connection.connect(f"\0{name}")
        if not _is_of_this_user(connection):
            raise PermissionError(f"the socket {name} belongs to another user. Start the job again")
        connection.sendall(hello(secret, member))
    except OSError:
        connection.close()
        raise
    return connection


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the peer has the same user. Abstract sockets lack permissions: any user may connect by name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()


def _admit(door: Door, neighbours: Neighbourhood, member: int, deadline: float) -> None:
    """Accept one connection. Close it unless it has the secret and comes from a missing member."""
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
    """Return the member number from a hello. None: a wrong secret, an error, or no hello within the timeout."""
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
        raise ConnectionError("the first rank on this host could not create the shared memory: see its error")
    return int(array.array("i", ancillary[0][2][:size])[0])
