"""Connections between the ranks of a job, over which they read and write chunks of commits in the background.

Each rank has a server. A client connects with a secret that only the ranks of this generation know, sends requests one
after the other, and gets a reply to each. A server never waits for another rank, so requests cannot form a circle.

    request or reply:  length of the words, length of the bytes | words (JSON) | bytes | one byte, in a reply

The last byte of a reply tells whether the bytes were still valid when all of them had been sent: their memory may be
reused in the meantime.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ddp.groups.ring import Port, open_port
from ddp.groups.segment import hello, read_hello

if TYPE_CHECKING:
    from ddp.elastic.team import Team

_FRAME = struct.Struct("<IQ")
_LONGEST = 1 << 20  # of the words
_MOST_BYTES = 64 << 20
_TIMEOUT_S = 60
_VALID = b"\x01"

Words = dict[str, Any]


class PeerError(OSError):
    """Another rank could not do what was asked."""


@dataclass(slots=True)
class Reply:
    words: Words
    data: memoryview | None = None
    still_valid: Any = None  # called when all has been sent


class Answering(Protocol):
    """What a server does with requests."""

    def place(self, words: Words, n_bytes: int) -> memoryview:
        """Return where to put the bytes of a request."""
        ...

    def answer(self, words: Words) -> Reply: ...


class Server:
    """Answers the requests of the other ranks, each connection in a thread of its own."""

    def __init__(self) -> None:
        self.port: Port = open_port()
        self.port.socket.listen(1024)
        self._answering: Answering | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] | None = set()  # None: stopped

    def start(self, answering: Answering) -> None:
        self._answering = answering
        threading.Thread(target=self._accept, name="ddp-peers", daemon=True).start()

    def stop(self) -> None:
        with self._lock:
            connections, self._open = self._open or set(), None
        for each in (self.port.socket, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _address = self.port.socket.accept()
            except OSError:
                return  # stopped
            with self._lock:
                if self._open is None:
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="ddp-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_TIMEOUT_S)
            if read_hello(connection, self.port.secret) is None:
                return
            _prepare(connection, receive_s=0)  # the next request may come much later
            while True:
                self._serve_one(connection)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the client is gone, or is none of ours
        finally:
            with self._lock:
                if self._open is not None:
                    self._open.discard(connection)
            connection.close()

    def _serve_one(self, connection: socket.socket) -> None:
        answering = self._answering
        assert answering is not None
        words, n_bytes = _receive_words(connection)
        error = None
        if n_bytes:
            try:
                place = answering.place(words, n_bytes)
            except OSError as problem:
                error, place = problem, memoryview(bytearray(n_bytes))
            _receive(connection, place)
        try:
            if error is not None:
                raise error
            reply = answering.answer(words)
        except OSError as problem:
            reply = Reply({"error": problem.strerror or str(problem)})
        _send(connection, reply.words, reply.data)
        is_valid = reply.still_valid is None or reply.still_valid()
        connection.sendall(_VALID if is_valid else b"\x00")


@dataclass(slots=True)
class Peer:
    """A connection to the server of another rank, which is opened when it is first used."""

    rank: int
    address: tuple[str, int]
    secret: str
    me: int
    _socket: socket.socket | None = field(default=None, repr=False)

    def ask(self, words: Words, data: memoryview | None = None, into: memoryview | None = None) -> Words:
        self.send(words, data)
        return self.receive(into)

    def send(self, words: Words, data: memoryview | None = None) -> None:
        with self._named():
            if self._socket is None:
                self._socket = socket.create_connection(self.address, timeout=_TIMEOUT_S)
                self._socket.sendall(hello(self.secret, self.me))
                _prepare(self._socket, receive_s=_TIMEOUT_S)
            _send(self._socket, words, data)

    def receive(self, into: memoryview | None = None) -> Words:
        """Receive the reply to the oldest request that has none yet."""
        with self._named():
            assert self._socket is not None
            words, n_bytes = _receive_words(self._socket)
            if n_bytes != len(into or b"") and "error" not in words:
                raise PeerError(f"{n_bytes} bytes instead of {len(into or b'')}")
            if into is not None and n_bytes:
                _receive(self._socket, into)
            is_valid = bytearray(1)
            _receive(self._socket, memoryview(is_valid))
        if "error" in words:
            raise PeerError(f"rank {self.rank}: {words['error']}")
        if is_valid != _VALID:
            raise PeerError(f"rank {self.rank} has overwritten this commit")
        return words

    @contextlib.contextmanager
    def _named(self) -> Any:
        try:
            yield
        except OSError as error:
            self.close()
            if isinstance(error, PeerError):
                raise
            why = error.strerror or str(error) or type(error).__name__
            raise PeerError(f"rank {self.rank} at {self.address[0]}:{self.address[1]}: {why}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(slots=True)
class Links:
    """This rank's server, and how to reach those of the others."""

    rank: int
    server: Server
    ports: list[tuple[str, int, str]]  # by rank: address, number, secret

    @classmethod
    def open(cls, team: Team) -> Links:
        """Collective."""
        server = Server()
        port = server.port
        return cls(team.rank, server, team.gather((port.address, port.number, port.secret)))

    def peer(self, rank: int) -> Peer:
        address, number, secret = self.ports[rank]
        return Peer(rank, (address, number), secret, self.rank)

    def stop(self) -> None:
        self.server.stop()


def _prepare(connection: socket.socket, receive_s: int) -> None:
    """Block in the kernel, with a limit: a socket with Python's timeout cannot receive many bytes in one call."""
    connection.settimeout(None)
    for option, seconds in ((socket.SO_SNDTIMEO, _TIMEOUT_S), (socket.SO_RCVTIMEO, receive_s)):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(connection: socket.socket, words: Words, data: memoryview | None) -> None:
    text = json.dumps(words).encode()
    connection.sendall(_FRAME.pack(len(text), len(data or b"")) + text)
    if data is not None and len(data):
        connection.sendall(data)


def _receive_words(connection: socket.socket) -> tuple[Words, int]:
    frame = bytearray(_FRAME.size)
    _receive(connection, memoryview(frame))
    length, n_bytes = _FRAME.unpack(frame)
    if length > _LONGEST or n_bytes > _MOST_BYTES:
        raise PeerError("not a message of ours")
    text = bytearray(length)
    _receive(connection, memoryview(text))
    words: Words = json.loads(text)
    return words, n_bytes


def _receive(connection: socket.socket, into: memoryview) -> None:
    while len(into):
        n_bytes = connection.recv_into(into, flags=socket.MSG_WAITALL)
        if not n_bytes:
            raise ConnectionResetError("the connection was closed")
        into = into[n_bytes:]
