"""Messages between agent and zygote: a length, then JSON, over a stream socket; descriptors ride on the length."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]
CANNOT_START = 71  # the exit code of a rank that the system would not start, on either side
_LENGTH_BYTES = 4
_MAX_FDS = 8


def pack(message: Message) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    data = pack(message)
    sent = socket.send_fds(sock, [data], fds) if fds else 0
    sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None at the end of the stream."""
    head, fds, _flags, _address = socket.recv_fds(sock, _LENGTH_BYTES, _MAX_FDS)
    if not head:
        return None
    head += _exactly(sock, _LENGTH_BYTES - len(head))
    return json.loads(_exactly(sock, int.from_bytes(head, "big"))), fds


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise ConnectionError("the stream ended inside a message")
        parts += part
    return bytes(parts)


class Decoder:
    """Cuts a byte stream into messages, for the side that reads without blocking."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[_LENGTH_BYTES:end]))
            del self._buffer[:end]
        return messages
