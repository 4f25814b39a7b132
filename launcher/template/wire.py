"""Messages over the stream socket between agent and zygote. Neither side blocks.

A frame is the length of its body, the number of its descriptors, and the body. An `Outbox` keeps what the socket does
not accept until the socket is writable again. With hundreds of ranks both ends send at the same time, and two blocking
ends would deadlock. Descriptors travel with the first byte of their frame. So they have arrived when the frame is
complete, and they arrive in the order of the frames.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import NamedTuple

from . import messages

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

    def put(self, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
        body = messages.encode(message)
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

    def take(self) -> Received | None:
        """Return the next complete message."""
        if len(self._buffer) < _HEAD_BYTES:
            return None
        end = _HEAD_BYTES + int.from_bytes(self._buffer[: _HEAD_BYTES - 1], "big")
        if len(self._buffer) < end:
            return None
        fds = tuple(self._fds.popleft() for _ in range(self._buffer[_HEAD_BYTES - 1]))
        message = messages.decode(self._buffer[_HEAD_BYTES:end])
        del self._buffer[:end]
        return Received(message, fds)

    def close(self) -> None:
        _close_all(tuple(self._fds))
        self._fds.clear()


class Received(NamedTuple):
    message: messages.Message
    fds: tuple[int, ...]


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
