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
from collections.abc import Callable
from dataclasses import dataclass

from ddp.telemetry.peers import boot_id

_HELLO = struct.Struct("=16sI")
_CREDENTIALS = struct.Struct("3i")  # pid, user id and group id of the peer
_ANSWER_WITHIN_S = 5.0
_ASK_EVERY_S = 0.2


def host_key() -> str:
    """Return a key that is equal for processes that can connect:

    same running kernel (boot id), network namespace and user.
    """
    return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"


@dataclass(frozen=True, slots=True)
class SegmentListener:
    """The listening socket of this member, which accepts the other members until all have connected."""

    socket: socket.socket
    name: str
    secret: str


def open_listener() -> SegmentListener:
    name = f"ddp-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return SegmentListener(listener, name, secrets.token_hex(16))


@dataclass(slots=True)
class LocalMembers:
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


def connect_members(
    listener: SegmentListener,
    listeners: list[tuple[str, str]],
    member: int,
    length: int,
    timeout_s: float,
    interrupted: Callable[[], str] = str,
) -> LocalMembers:
    """Connect all members and share the file. `listeners`: name and secret of every member's listener, in order.

    `interrupted` returns why this process must not wait any longer, or "".
    """
    deadline = time.monotonic() + timeout_s
    members = LocalMembers(-1, [None] * len(listeners))
    try:
        if member == 0:
            members.file = anonymous_file(length)
        for other, (name, secret) in enumerate(listeners[:member]):
            members.connections[other] = _connect_to(name, secret, member, deadline)
        while any(each is None for each in members.connections[member + 1 :]):
            _accept_one(listener, members, member, deadline, interrupted)
        if member:
            members.file = _receive_file(members.connections[0], deadline)
    except OSError:
        members.close()
        raise
    return members


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not all ranks on this host connected in time. See the logs of the other ranks")
    return left


def _connect_to(name: str, secret: str, member: int, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_seconds_left(deadline))
        connection.connect(f"\0{name}")
        if not _is_of_this_user(connection):
            raise PermissionError(
                f"the socket {name} belongs to another user. Start the job again: it then uses another name"
            )
        connection.sendall(hello(secret, member))
    except OSError:
        connection.close()
        raise
    return connection


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the peer has the same user. Abstract sockets lack permissions: any user may connect by name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()


def accept(listener: socket.socket, deadline: float, interrupted: Callable[[], str]) -> socket.socket | None:
    """Accept a connection. None: the deadline has passed. Raise InterruptedError if the caller must not wait."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(min(left, _ASK_EVERY_S))
        try:
            return listener.accept()[0]
        except TimeoutError:
            if reason := interrupted():
                raise InterruptedError(reason) from None
    return None


def _accept_one(
    listener: SegmentListener,
    members: LocalMembers,
    member: int,
    deadline: float,
    interrupted: Callable[[], str],
) -> None:
    """Accept one connection. Close it if its secret is wrong or if its member is already connected."""
    connection = accept(listener.socket, deadline, interrupted)
    if connection is None:
        raise TimeoutError("not all ranks on this host connected in time. See the logs of the other ranks")
    other = read_hello(connection, listener.secret) if _is_of_this_user(connection) else None
    missing = other is not None and member < other < len(members.connections)
    if other is None or not missing or members.connections[other] is not None:
        connection.close()
        return
    members.connections[other] = connection
    if member == 0:
        socket.send_fds(connection, [b"f"], [members.file])


def read_hello(connection: socket.socket, secret: str) -> int | None:
    """Return the member number from a hello. None: a wrong secret, an error, or no hello within the timeout."""
    connection.settimeout(_ANSWER_WITHIN_S)
    received = b""
    try:
        while len(received) < _HELLO.size and (more := connection.recv(_HELLO.size - len(received))):
            received += more
    except OSError:
        return None
    if len(received) < _HELLO.size:
        return None
    token, who = _HELLO.unpack(received)
    return int(who) if hmac.compare_digest(token, bytes.fromhex(secret)) else None


def hello(secret: str, who: int) -> bytes:
    return _HELLO.pack(bytes.fromhex(secret), who)


def _receive_file(connection: socket.socket | None, deadline: float) -> int:
    assert connection is not None
    connection.settimeout(_seconds_left(deadline))
    size = array.array("i").itemsize
    word, ancillary, _flags, _address = connection.recvmsg(
        1, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
    )
    if not word or not ancillary:
        raise ConnectionError(
            "the first rank on this host could not create the shared memory: see the error of that rank"
        )
    return int(array.array("i", ancillary[0][2][:size])[0])
