"""Ends connections of strangers to the gRPC ports, before they take the places of agents.

Theory of operation
-------------------
gRPC accepts connections itself, and knows one limit: that of all connections. A client without credentials could fill
it. So a task of the service looks at the sockets of the process. A connection is a stranger until a call on it has
shown who the client is (`admit`). If strangers have taken most of the room that known connections leave, some of them
end: of the address with the most strangers, the oldest first. So an honest client, whose address has few, keeps its
place. IPv6 addresses count by their first 64 bits, because one host has as many as it likes.

A stranger that sends more than its calls need, and does not stop, is a flood (of SETTINGS, PING, RST_STREAM ...). So
are strangers that make more calls than probes do, if those of their address make many. gRPC would work for each frame,
and whoever is ended may be back at once. So the kernel drops what a flood sends from now on: its client waits for
nothing, and costs nothing, until the connection ends later. Known connections have the limits of their identity.

A connection ends by shutting down a duplicate of its socket. gRPC then finds that the client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heapreplace
from ipaddress import IPv6Address, ip_address
from typing import Any, TypeVar
from urllib.parse import unquote

Peer = tuple[str, int]  # address and port
_Told = TypeVar("_Told")

CALLS_PER_S, _CALLS_OF_A_PROBE = 200, 2  # in a second: of all strangers of an address; of one that never ends
_SENT, _SENT_PER_CALL = 128 * 1024, 1024  # bytes: a TLS handshake and the longest first call; a probe later
_BY_ALL, _SENT_IF_MANY = 8 << 20, 8 * 1024  # if all have sent so much: a handshake and a usual first call
_STILL_SENT = 2 * 1024  # bytes after the service has seen that: nobody who waits for an answer sends them
_MUTED_S = 60.0
_ATTACH_FILTER, _BPF_RETURN, _DRAINED = 26, 6, 1 << 20  # of Linux, and bytes at once
_QUIET_S, _CROWDED_S = 0.25, 0.05
_OWN_SHARE, _CROWDED_SHARE = 0.02, 0.1  # of the time of the process, at most
_AT_WORK = 0.1  # of a processor: less is no flood


class Connections:
    """`places`: how many connections gRPC accepts. `refused` gets an address and the reason."""

    def __init__(self, places: int, refused: Callable[[str, str], None]) -> None:
        self._places, self._refused = places, refused
        self._ports: frozenset[int] = frozenset()
        self._known: set[Peer] = set()
        self._strangers: dict[Peer, None] = {}  # the oldest first
        self._calls: dict[Peer, int] = {}  # of strangers, in this second
        self._calls_since = 0.0
        self._sent = Sent()
        self._muted: dict[Peer, float] = {}  # and until when
        self._cpu = (0.0, 0.0)  # of this process, at the last look, and when that was

    def admit(self, context: Any) -> None:
        """A call on this connection has shown who the client is."""
        if (peer := peer_of(context)) is not None:
            self._known.add(peer)

    def note_call(self, context: Any) -> None:
        """A call has arrived, from whomever."""
        peer = peer_of(context)
        if peer is not None and peer not in self._known:
            self._calls[peer] = self._calls.get(peer, 0) + 1
            self._sent.calls[peer] += 1

    async def guard(self, ports: Iterable[int]) -> None:
        """Look at the connections of these ports until cancelled."""
        self._ports = frozenset(ports)
        while True:
            at = time.thread_time()
            crowded = self._look(time.monotonic())
            took_s = time.thread_time() - at
            pause_s, share = (_CROWDED_S, _CROWDED_SHARE) if crowded else (_QUIET_S, _OWN_SHARE)
            await asyncio.sleep(max(pause_s, took_s / share))

    def _look(self, now: float) -> bool:
        busy = too_busy({peer: calls for peer, calls in self._calls.items() if peer not in self._known})
        if now - self._calls_since >= 1.0:
            self._calls, self._calls_since = {}, now
        (cpu, at), self._cpu = self._cpu, (time.process_time(), now)
        works = self._cpu[0] - cpu > _AT_WORK * (now - at)
        descriptors = _descriptors()
        crowded = len(descriptors) > self._places * 3 // 4
        ends = next(iter(self._muted.values()), now + 1.0) <= now
        if crowded or works or busy or ends or len(self._known) > 2 * len(descriptors) + 64:
            self._sweep(descriptors, busy, now)
        return crowded or bool(self._sent.noted)

    def _sweep(self, descriptors: Iterable[int], busy: Collection[Peer], now: float) -> None:
        found = {peer: descriptor for descriptor in descriptors if (peer := self._client_at(descriptor))}
        self._known &= found.keys()
        self._muted = {peer: until for peer, until in self._muted.items() if peer in found}
        strangers = [peer for peer in self._strangers if peer in found]
        strangers += [peer for peer in found if peer not in self._strangers]
        strangers = [peer for peer in strangers if peer not in self._known]
        ending = surplus(strangers, self._places - len(self._known))
        ended = {*ending, *(peer for peer, until in self._muted.items() if until <= now)}
        for peer in ended:
            self._with_socket(found[peer], peer, lambda sock: sock.shutdown(socket.SHUT_RDWR))
        for peer in ending:
            self._refused(peer[0], "too many open connections without credentials")
        self._strangers = dict.fromkeys(peer for peer in strangers if peer not in ended)
        heard = [peer for peer in self._strangers if peer not in self._muted]
        floods = self._sent.floods(
            {peer: self._with_socket(found[peer], peer, _received) or 0 for peer in heard}
        )
        for peer in heard:
            if peer in floods or peer in busy:
                self._with_socket(found[peer], peer, mute)
                self._muted[peer] = now + _MUTED_S
                self._refused(
                    peer[0], f"too {'much data' if peer in floods else 'many calls'} without credentials"
                )

    def _client_at(self, descriptor: int) -> Peer | None:
        """None if it is not a connection to one of the ports."""
        try:
            sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)  # or another family
        except OSError:  # closed by now, or not a socket
            return None
        try:
            return self._client_of(sock)
        except OSError:  # no socket, or not connected
            return None
        finally:
            sock.detach()

    def _client_of(self, sock: socket.socket) -> Peer | None:
        where = sock.getpeername()
        if not isinstance(where, tuple):
            return None  # a Unix socket
        peer = _plain(where[0]), where[1]
        return peer if peer in self._known or sock.getsockname()[1] in self._ports else None

    def _with_socket(
        self, descriptor: int, peer: Peer, act: Callable[[socket.socket], _Told]
    ) -> _Told | None:
        """By a duplicate: gRPC may close its descriptor at any time, and another connection may get the number."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
            if self._client_of(same) == peer:
                return act(same)
        return None


class Sent:
    """Which strangers send on and on. `calls`: how many each has made."""

    def __init__(self) -> None:
        self.calls: Counter[Peer] = Counter()
        self.noted: dict[Peer, int] = {}  # what those had sent whom a look found beyond their allowance

    def floods(self, sent: Mapping[Peer, int]) -> set[Peer]:
        """A look at all strangers: how many bytes each has sent."""
        self.calls = Counter({peer: calls for peer, calls in self.calls.items() if peer in sent})
        most = _SENT if sum(sent.values()) < _BY_ALL else _SENT_IF_MANY
        beyond = {peer: n for peer, n in sent.items() if n > most + self.calls[peer] * _SENT_PER_CALL}
        self.noted = {peer: self.noted.get(peer, n) for peer, n in beyond.items()}
        return {peer for peer, n in beyond.items() if n - self.noted[peer] > _STILL_SENT}


def _received(sock: socket.socket) -> int:
    """How many bytes the client has sent; 0 where the kernel does not tell."""
    with contextlib.suppress(struct.error):
        return int(struct.unpack_from("Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 128)[0])
    return 0


def mute(sock: socket.socket) -> None:
    """Let the kernel drop what this client sends from now on, and what nobody has read. It is reset when it ends."""
    if not sys.platform.startswith("linux"):
        sock.shutdown(socket.SHUT_RDWR)
        return
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(BlockingIOError):
        while sock.recv(_DRAINED, socket.MSG_TRUNC | socket.MSG_DONTWAIT):
            pass


def too_busy(calls: Mapping[Peer, int]) -> set[Peer]:
    """Which strangers make more than their share of the calls of an address, if these are too many."""
    by_site: dict[str, list[Peer]] = {}
    for peer in calls:
        by_site.setdefault(_site(peer[0]), []).append(peer)
    busy: set[Peer] = set()
    for peers in by_site.values():
        if sum(calls[peer] for peer in peers) > CALLS_PER_S:
            share = max(_CALLS_OF_A_PROBE, CALLS_PER_S // len(peers))
            busy |= {peer for peer in peers if calls[peer] > share}
    return busy


def surplus(strangers: Iterable[Peer], room: int) -> list[Peer]:
    """Which strangers to end, the oldest come first: if they take most of the room, so many that half is free."""
    by_site: dict[str, list[Peer]] = {}
    count = 0
    for peer in strangers:
        by_site.setdefault(_site(peer[0]), []).append(peer)
        count += 1
    if count <= room * 3 // 4:
        return []
    ending: list[Peer] = []
    sites = [(-len(peers), site, 0) for site, peers in by_site.items()]
    heapify(sites)
    while count - len(ending) > room // 2:
        left, site, taken = sites[0]
        ending.append(by_site[site][taken])
        heapreplace(sites, (left + 1, site, taken + 1))
    return ending


def _site(address: str) -> str:
    with contextlib.suppress(ValueError):
        found = ip_address(address.partition("%")[0])
        if isinstance(found, IPv6Address):
            return str(found.packed[:8])
    return address


def _plain(address: str) -> str:
    """An IPv4 client of an IPv6 socket has its IPv4 address. gRPC and Python write the interface differently."""
    return address.removeprefix("::ffff:").partition("%")[0]


def peer_of(context: Any) -> Peer | None:
    """None for a Unix socket, which only this user reaches."""
    kind, _, rest = str(context.peer()).partition(":")
    address, _, port = unquote(rest).rpartition(":")
    return (_plain(address.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/dev/fd")]
