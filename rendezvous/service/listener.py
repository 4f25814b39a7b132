"""Accepts the connections of one HTTP port, so that strangers can neither exhaust the process nor lock users out.

Theory of operation
-------------------
A connection begins as a stranger. It ends after `STRANGER_S`, whatever it does: it may be silent, within a TLS
handshake, within a header, or slow to read its answer. There are few places for strangers. A new connection that finds
none takes the place of the oldest stranger of its address, or of the oldest of all. So an honest client, which needs
its place for a moment, gets one during a flood. `admit` makes a connection known, once a request has shown a valid
session. A known connection has no time limit and is never ended for another one. Each name has few places, too.

The accept loop pauses after each connection, so a flood waits in the kernel and leaves time to the other tasks of the
process. If the process has no descriptors left, the loop pauses longer. (asyncio's own loop logs the error once for
each connection of the backlog, and starts as many loops.) The places are a part of the descriptors of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger("rendezvous")

STRANGER_S = 15.0
_BACKLOG = 128
_BETWEEN_S = 0.005  # 200 connections, and TLS handshakes, per second
_AFTER_ERROR_S = 1.0
_ERROR_LOGGED_EVERY_S = 60.0
_SHARE = 8  # strangers and known connections together: at most this part of the descriptors


@dataclass(frozen=True, slots=True)
class Places:
    """How many connections may be open at once."""

    strangers: int = 256
    of_an_address: int = 64  # of the strangers
    known: int = 768
    of_a_name: int = 64  # of those that are known

    def within(self, descriptors: int) -> Places:
        """The same, but at most a part of the descriptors that the process may open."""
        strangers = max(4, min(self.strangers, descriptors // (4 * _SHARE)))
        known = max(12, min(self.known, 3 * descriptors // (4 * _SHARE)))
        return Places(strangers, min(self.of_an_address, strangers), known, min(self.of_a_name, known))


class _Connection:
    def __init__(self, sock: socket.socket, address: str, port: int) -> None:
        self.sock, self.address, self.port = sock, address, port
        self.name = ""  # whose session it has shown
        self.transport: asyncio.BaseTransport | None = None
        self.opening: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0  # its transport closes this very socket

    def end(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class Listener:
    """`factory` makes the protocol of a connection. `crowded` gets the address when a stranger loses its place."""

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        crowded: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
        places: Places | None = None,
    ) -> None:
        self._factory, self._crowded, self._tls = factory, crowded, tls
        self._places = (places or Places()).within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._strangers: list[_Connection] = []  # the oldest first
        self._known: list[_Connection] = []
        self._accepting: set[asyncio.Task[None]] = set()
        self._error_logged_at = -_ERROR_LOGGED_EVERY_S

    def start(self, listening: Iterable[socket.socket]) -> None:
        """Accept the connections of these sockets, which listen and do not block, until `close`."""
        loop = asyncio.get_running_loop()
        self._accepting = {loop.create_task(self._accept_all(sock), name="accept") for sock in listening}

    def admit(self, address: str, port: int, name: str) -> bool:
        """Make the connection from this peer known, if it is not yet. False if there is no place for it."""
        self._known = [each for each in self._known if each.is_open]
        if any((each.address, each.port) == (address, port) for each in self._known):
            return True
        found = [each for each in self._strangers if (each.address, each.port) == (address, port)]
        of_name = sum(1 for each in self._known if each.name == name)
        if not found or len(self._known) >= self._places.known or of_name >= self._places.of_a_name:
            return False
        (connection,) = found
        self._strangers.remove(connection)
        self._known.append(connection)
        connection.name = name
        if connection.deadline is not None:
            connection.deadline.cancel()
        return True

    async def close(self) -> None:
        """Stop accepting, and end the strangers. Known connections end with their answers."""
        ending = [*self._accepting, *(each.opening for each in self._strangers if each.opening is not None)]
        for accepting in self._accepting:
            accepting.cancel()
        for connection in self._strangers:
            connection.end()
        if ending:
            await asyncio.wait(ending)

    # --- accepting

    async def _accept_all(self, listening: socket.socket) -> None:
        with listening:
            while True:
                await self._accept_one(listening)
                await asyncio.sleep(_BETWEEN_S)

    async def _accept_one(self, listening: socket.socket) -> None:
        try:
            sock, where = await asyncio.get_running_loop().sock_accept(listening)
        except ConnectionAbortedError:
            pass  # the client is gone
        except OSError as error:  # no descriptors or no memory
            now = asyncio.get_running_loop().time()
            if now - self._error_logged_at >= _ERROR_LOGGED_EVERY_S:
                self._error_logged_at = now
                _log.error(
                    "cannot accept an HTTP connection: %s; trying again", os.strerror(error.errno or 0)
                )
            await asyncio.sleep(_AFTER_ERROR_S)
        else:
            self._take(_Connection(sock, str(where[0]), int(where[1])))

    def _take(self, new: _Connection) -> None:
        self._strangers = [each for each in self._strangers if each.is_open]
        same = [each for each in self._strangers if each.address == new.address]
        if len(same) >= self._places.of_an_address:
            self._remove(same[0])
        elif len(self._strangers) >= self._places.strangers:
            self._remove(self._strangers[0])
        self._strangers.append(new)
        loop = asyncio.get_running_loop()
        new.opening = loop.create_task(self._open(new), name="open connection")
        new.deadline = loop.call_later(STRANGER_S, new.end)

    def _remove(self, stranger: _Connection) -> None:
        self._strangers.remove(stranger)
        stranger.end()
        self._crowded(stranger.address)

    async def _open(self, new: _Connection) -> None:
        """The TLS handshake, if any. It also ends when `end` cancels it."""
        loop = asyncio.get_running_loop()
        try:
            new.transport, _ = await loop.connect_accepted_socket(self._factory, new.sock, ssl=self._tls)
        except OSError:
            pass  # the client is gone, or speaks no TLS
        finally:
            new.opening = None
            if new.transport is None:
                with contextlib.suppress(OSError):
                    new.sock.close()


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of the host; at the first one if `port` is 0. Raises `OSError`. Call it in a thread."""
    answers = socket.getaddrinfo(
        host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    found = list(dict.fromkeys((family, where) for family, _, _, _, where in answers))
    problem = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    opened: list[socket.socket] = []
    for family, where in found if port else found[:1]:
        try:
            opened.append(_listening_socket(family, where, is_one_of_several=len(found) > 1))
        except OSError as error:
            problem = error
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                break  # those two: such as IPv6 where there is none
    else:
        if opened:
            return opened
    for sock in opened:
        sock.close()
    raise problem


def _listening_socket(family: int, where: Any, *, is_one_of_several: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and is_one_of_several:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
