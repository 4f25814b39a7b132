"""Ends connections of strangers to the gRPC ports, before they take the places of agents.

Theory of operation
-------------------
gRPC accepts connections itself, and knows one limit: that of all connections. A client without credentials could fill
it. So a task of the service looks at the sockets of the process. A connection is a stranger until a call on it has
shown who the client is (`admit`). If strangers have taken most of the room that known connections leave, some of them
end: of the address with the most strangers, the oldest first. So an honest client, whose address has few, keeps its
place. IPv6 addresses count by their first 64 bits, because one host has as many as it likes.

If the strangers of an address make many calls, those end that make more than a probe does. Known connections have the
limits of their identity.

A connection ends by shutting down a duplicate of its socket. gRPC then finds that the client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heapreplace
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

Peer = tuple[str, int]  # address and port

CALLS_PER_S, _CALLS_OF_A_PROBE = 200, 8  # in a second: of all strangers of an address; of one that never ends
_QUIET_S, _CROWDED_S = 0.25, 0.05
_OWN_SHARE = 0.02  # of the time of the process, at most


class Connections:
    """`places`: how many connections gRPC accepts. `refused` gets an address and the reason."""

    def __init__(self, places: int, refused: Callable[[str, str], None]) -> None:
        self._places, self._refused = places, refused
        self._ports: frozenset[int] = frozenset()
        self._known: set[Peer] = set()
        self._strangers: dict[Peer, None] = {}  # the oldest first
        self._calls: dict[Peer, int] = {}  # of strangers, in this second
        self._calls_since = 0.0

    def admit(self, context: Any) -> None:
        """A call on this connection has shown who the client is."""
        if (peer := peer_of(context)) is not None:
            self._known.add(peer)

    def note_call(self, context: Any) -> None:
        """A call has arrived, from whomever."""
        peer = peer_of(context)
        if peer is not None and peer not in self._known:
            self._calls[peer] = self._calls.get(peer, 0) + 1

    async def guard(self, ports: Iterable[int]) -> None:
        """Look at the connections of these ports until cancelled."""
        self._ports = frozenset(ports)
        while True:
            at = time.monotonic()
            crowded = self._look(at)
            took_s = time.monotonic() - at
            await asyncio.sleep(max(_CROWDED_S if crowded else _QUIET_S, took_s / _OWN_SHARE))

    def _look(self, now: float) -> bool:
        busy = too_busy({peer: calls for peer, calls in self._calls.items() if peer not in self._known})
        if now - self._calls_since >= 1.0:
            self._calls, self._calls_since = {}, now
        descriptors = _descriptors()
        crowded = len(descriptors) > self._places * 3 // 4
        if crowded or busy or len(self._known) > 2 * len(descriptors) + 64:
            self._sweep(descriptors, busy)
        return crowded

    def _sweep(self, descriptors: Iterable[int], busy: Collection[Peer]) -> None:
        found = {peer: descriptor for descriptor in descriptors if (peer := self._client_at(descriptor))}
        self._known &= found.keys()
        strangers = [peer for peer in self._strangers if peer in found]
        strangers += [peer for peer in found if peer not in self._strangers]
        strangers = [peer for peer in strangers if peer not in self._known]
        room = self._places - len(self._known)
        ending = dict.fromkeys(surplus(strangers, room), "too many open connections")
        ending |= {peer: "too many calls" for peer in strangers if peer in busy}
        for peer, words in ending.items():
            self._end(found[peer], peer)
            self._refused(peer[0], f"{words} without credentials")
        self._strangers = dict.fromkeys(peer for peer in strangers if peer not in ending)

    def _client_at(self, descriptor: int) -> Peer | None:
        """None if it is not a connection to one of the ports."""
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:  # closed by now, or not a socket
            return None
        try:
            return self._client_of(sock)
        except OSError:
            return None
        finally:
            sock.detach()

    def _client_of(self, sock: socket.socket) -> Peer | None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] not in self._ports:
            return None
        address, port = sock.getpeername()[:2]
        return _plain(address), port

    def _end(self, descriptor: int, peer: Peer) -> None:
        """By a duplicate: gRPC may close its descriptor at any time, and another connection may get the number."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
            if self._client_of(same) == peer:
                same.shutdown(socket.SHUT_RDWR)


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
    """As gRPC names a peer: an IPv4 client of an IPv6 socket has its IPv4 address."""
    return address.removeprefix("::ffff:")


def peer_of(context: Any) -> Peer | None:
    """None for a Unix socket, which only this user reaches."""
    kind, _, rest = str(context.peer()).partition(":")
    address, _, port = unquote(rest).rpartition(":")
    return (address.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/dev/fd")]
