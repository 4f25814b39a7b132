"""Messages between a command and a template of the pool: one JSON object per frame, with descriptors.

Both sides are small programs that wait for each other for a limited time, so the sockets block, with a timeout.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

_HEAD_BYTES = 4
_MOST_BYTES = 1 << 22  # an environment has at most a quarter of this
_MOST_FDS = 8


class Broken(OSError):
    """The other end has closed, or does not speak this protocol."""


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(_HEAD_BYTES, "big") + body
    sent = socket.send_fds(sock, [frame], fds) if fds else 0
    sock.sendall(frame[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller owns. Raises OSError."""
    data, fds = bytearray(), []
    try:
        while len(data) < _HEAD_BYTES or len(data) < (wanted := _wanted(data)):
            part, more, flags, _address = socket.recv_fds(
                sock, (_HEAD_BYTES if len(data) < _HEAD_BYTES else wanted) - len(data), _MOST_FDS, _CLOEXEC
            )
            fds += more
            data += part
            if not part or flags & socket.MSG_CTRUNC:
                raise Broken("the connection has ended")
        message = json.loads(data[_HEAD_BYTES:])
        if not isinstance(message, dict):
            raise Broken("not a message")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValueError):
            raise Broken("not a message") from None
        raise
    return message, fds


_CLOEXEC = socket.MSG_CMSG_CLOEXEC


def _wanted(data: bytearray) -> int:
    length = int.from_bytes(data[:_HEAD_BYTES], "big")
    if length > _MOST_BYTES:
        raise Broken("the message is too long")
    return _HEAD_BYTES + length
