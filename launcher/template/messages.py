"""The messages between agent and zygote: frozen values, encoded to and decoded from JSON in this module only.

They are named tuples because Python creates such classes in a fraction of the time that dataclasses take, and the start
of the plain zygote is part of every launch.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from typing import NamedTuple, get_args


class Spawn(NamedTuple):
    """Start a rank. The descriptors of its standard output and error are sent with the message."""

    local_rank: int
    generation: int
    argv: tuple[str, ...]
    args: tuple[str, ...] | None  # if they differ from the command line that all ranks share
    env: dict[str, str]
    cpus: tuple[int, ...]
    has_group: bool  # signals go to its whole process group
    is_store_kept: bool
    is_python: bool = True  # False: a program of any kind


class Keep(NamedTuple):
    """Keep a store for the ranks of this generation. With `port` 0, any port.

    `command` executes a process that can, if this one has no torch (`store`); empty: there is none.
    """

    generation: int
    host: str
    port: int
    command: tuple[str, ...] = ()


class Signal(NamedTuple):
    signum: int
    ranks: tuple[int, ...] | None  # None: all of them


class SweepOrder(NamedTuple):
    """End all processes that the ranks of this generation have left behind.

    Processes in a session of their own have `patience_s` to end by themselves. `kept`: local ranks that continue; the
    sweep spares them and their processes.
    """

    generation: int
    patience_s: float = 0.0
    kept: tuple[int, ...] = ()


class Learn(NamedTuple):
    """Import what ranks on other nodes of the job have imported, if this zygote has not started a rank yet."""

    names: tuple[str, ...]


class Ready(NamedTuple):
    reason: str  # why the zygote is not warm, if it should be


class Started(NamedTuple):
    local_rank: int
    generation: int
    pid: int


class Exited(NamedTuple):
    local_rank: int
    generation: int
    pid: int
    exit_code: int | None  # None: a signal ended it
    signum: int
    at: float  # on the monotonic clock; the reports come in the order in which the ranks ended
    told: int = 0  # the last signal that the zygote sent it before it ended
    obstacle: str = ""  # why the rank did not start


class Keeping(NamedTuple):
    generation: int
    port: int
    is_kept: bool  # False: the port is only reserved for rank 0's own store
    error: str = ""


class KeeperEnded(NamedTuple):
    """The process that kept the store of this generation has ended by itself."""

    generation: int
    reason: str


class SweepDone(NamedTuple):
    generation: int
    killed: int


class Signalled(NamedTuple):
    """A process has sent a signal to the zygote. Under torchrun, the parent of the ranks is the launcher."""

    signum: int
    local_rank: int | None  # that sent it; None: a process that is gone, or not one of a rank


class Late(NamedTuple):
    """A script has set variables that torch reads when it is imported, and then imported torch."""

    variables: tuple[str, ...]
    file: str  # which seems to set them; "": not known


class Learned(NamedTuple):
    """All ranks have begun to import these modules, with the variables and in the folder of their start."""

    names: tuple[str, ...]


Order = Spawn | Keep | Signal | SweepOrder | Learn
Report = Ready | Started | Exited | Keeping | KeeperEnded | SweepDone | Signalled | Late | Learned
Message = Order | Report

CANNOT_START = 71  # the exit code of a rank that the system could not start, in agent and zygote
_KINDS = {kind.__name__: kind for kind in get_args(Order) + get_args(Report)}


def encode(message: Message) -> bytes:
    return json.dumps((type(message).__name__, *message)).encode()


def decode(data: bytes | bytearray) -> Message:
    kind, *fields = json.loads(data)
    message: Message = _KINDS[kind](*(tuple(field) if type(field) is list else field for field in fields))
    return message


# --- the stream ------------------------------------------------------------------------------------
#
# Messages travel over the stream socket between agent and zygote. Neither side blocks.
#
# A frame is the length of its body, the number of its descriptors, and the body. An `Outbox` keeps what the socket
# does not accept until the socket is writable again. With hundreds of ranks both ends send at the same time, and two
# blocking ends would deadlock. Descriptors travel with the first byte of their frame. So they have arrived when the
# frame is complete, and they arrive in the order of the frames.

_HEAD_BYTES = 5
_READ_BYTES = 1 << 16
_MAX_FDS = 8


class Outbox:
    """Sends messages in order. It owns their descriptors, and closes them once they are sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._frames

    def put(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        body = encode(message)
        frame = len(body).to_bytes(_HEAD_BYTES - 1, "big") + bytes((len(fds),)) + body
        self._frames.append((memoryview(frame), fds))

    def flush(self) -> None:
        """Send what the socket accepts now. Raises OSError if the other end is closed."""
        while self._frames:
            frame, fds = self._frames[0]
            try:
                sent = socket.send_fds(self._sock, [frame], fds) if fds else self._sock.send(frame)
            except BlockingIOError:
                return
            _close_all(fds)
            if sent < len(frame):
                self._frames[0] = (frame[sent:], ())
            else:
                self._frames.popleft()

    def close(self) -> None:
        """Drop what was not sent."""
        for _frame, fds in self._frames:
            _close_all(fds)
        self._frames.clear()


class Inbox:
    """Splits the stream into messages. It owns received descriptors until `take` returns them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive(self) -> bool:
        """Read what has arrived. Return False at the end of the stream."""
        try:
            data, fds, flags, _address = socket.recv_fds(
                self._sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._buffer += data
        self._fds += fds
        # A descriptor can be lost to a limit. The following ones would then go to the wrong ranks, so the stream ends.
        return bool(data) and not flags & socket.MSG_CTRUNC

    def take(self) -> ReceivedFrame | None:
        """Return the next complete message."""
        if len(self._buffer) < _HEAD_BYTES:
            return None
        end = _HEAD_BYTES + int.from_bytes(self._buffer[: _HEAD_BYTES - 1], "big")
        if len(self._buffer) < end:
            return None
        fds = tuple(self._fds.popleft() for _ in range(self._buffer[_HEAD_BYTES - 1]))
        message = decode(self._buffer[_HEAD_BYTES:end])
        del self._buffer[:end]
        return ReceivedFrame(message, fds)

    def close(self) -> None:
        _close_all(tuple(self._fds))
        self._fds.clear()


class ReceivedFrame(NamedTuple):
    message: Message
    fds: tuple[int, ...]


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
