"""Which of this process's TCP connections lead to which rank, and which of them the other side has closed.

Theory of operation
-------------------
Gloo, NCCL and our own ring keep their sockets to themselves, and what they say of a lost peer is an address, at
best. But a connection between two ranks has two ends, and each rank can see its own: so every rank writes the ends
of its connections into the store that the ranks meet at, and whose end is the mirror image of one of ours is the
rank at the other side of it. Nothing of this depends on how a library sets up its connections.

Once a connection's peer is known, the kernel tells when it is closed, whether or not anybody waits for it just now.
The first to close is the one that went first; those that follow went because of it.

Worlds of more than `MOST_RANKS` are left alone: their ranks would read too much of each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

MOST_RANKS = 256
_AGAIN_AFTER_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # the others may not have written theirs yet
_SAME_FALL_S = 5.0  # closed no longer than this before the failure: part of it
_ADDRESS = re.compile(r"\[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F]*:[0-9a-fA-F:.]+)\]?[:<](\d{1,5})")
_KEY = "ddp/peers/"

End = str  # "10.0.0.1 4711"


@dataclass(frozen=True, slots=True)
class Connection:
    fd: int
    inode: int
    here: End
    there: End


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other side, as far as it is known."""

    rank: int | None = None
    host: str = ""

    def __str__(self) -> str:
        where = f" (on {self.host})" if self.host else ""
        return f"rank {self.rank}{where}" if self.rank is not None else f"a rank on {self.host}"


@dataclass(frozen=True, slots=True)
class Closing:
    at: float
    peer: Peer
    there: End


def _end(address: Any) -> End:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"


def connections() -> list[Connection]:
    """Of this process, over TCP, with somebody at the other side."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = _connection(int(name))
                if one is not None:
                    found.append(one)
    return found


def _connection(fd: int) -> Connection | None:
    with socket.socket(fileno=os.dup(fd)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
            return None
        return Connection(fd, os.fstat(fd).st_ino, _end(end.getsockname()), _end(end.getpeername()))


def cut(those: list[Connection]) -> int:
    """Ends them for both sides: whoever waits for one of them is released. Those that are other files by now stay."""
    n_cut = 0
    for one in those:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as end:
            if os.fstat(end.fileno()).st_ino == one.inode:
                end.shutdown(socket.SHUT_RDWR)
                n_cut += 1
    return n_cut


class Peers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Connection, Peer]] = {}  # by inode
        self._store_ends: list[Connection] = []
        self._hosts: dict[int, str] = {}
        self._closings: list[Closing] = []
        self._closed = select.epoll()
        self._again = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._closed.fileno()

    # --- finding out ---------------------------------------------------------------------------------

    def new_groups(self) -> None:
        """There may be new connections; who is behind them is found out in the background."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp-peers", daemon=True)
            self._thread.start()
        self._again.set()

    def end(self) -> None:
        """Before the interpreter goes: a thread that is then in torch's code would take the process down with it."""
        self._over.set()
        self._again.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while self._again.wait() and not self._over.is_set():
            self._again.clear()
            with contextlib.suppress(
                Exception
            ):  # a store that is gone, a group taken apart: less is known then
                self._introduce()

    def _introduce(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_initialized() or not 1 < dist.get_world_size() <= MOST_RANKS:
            return
        rank, world, store = dist.get_rank(), dist.get_world_size(), distributed_c10d._get_default_store()
        others = [other for other in range(world) if other != rank]
        wanted = self._look(store, rank)
        for pause in _AGAIN_AFTER_S:
            if self._over.is_set() or self._again.is_set():
                return
            if store.check([f"{_KEY}{other}" for other in others]):
                told = store.multi_get([f"{_KEY}{other}" for other in others])
                self._match(
                    wanted, {other: json.loads(each) for other, each in zip(others, told, strict=True)}
                )
                if len(self._known) >= len(wanted):
                    return
            self._over.wait(pause)

    def _look(self, store: Any, rank: int) -> list[Connection]:
        found = connections()
        port = _port_of(store)
        beside = [one for one in found if port not in (one.here.split()[1], one.there.split()[1])]
        with self._lock:
            self._store_ends = [one for one in found if one not in beside]
        said = {"host": socket.gethostname(), "ends": [[one.here, one.there] for one in beside]}
        store.set(f"{_KEY}{rank}", json.dumps(said))
        return beside

    def _match(self, mine: list[Connection], told: dict[int, Any]) -> None:
        owners = {(here, there): rank for rank, said in told.items() for here, there in said["ends"]}
        with self._lock:
            self._hosts = {rank: said["host"] for rank, said in told.items()}
            for one in mine:
                rank = owners.get((one.there, one.here))
                if rank is None or one.inode in self._known:
                    continue
                self._known[one.inode] = (one, Peer(rank, self._hosts[rank]))
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._closed.register(one.fd, select.EPOLLRDHUP | select.EPOLLET)

    # --- what has become of them ---------------------------------------------------------------------

    def note_closings(self) -> None:
        """As the kernel tells them; asked also by whoever has just been told of a failure."""
        events = self._closed.poll(0)
        at = time.monotonic()
        with self._lock:
            by_fd = {one.fd: (one, peer) for one, peer in self._known.values()}
            for fd, _what in events:
                if fd in by_fd:
                    one, peer = by_fd[fd]
                    self._closings.append(Closing(at, peer, one.there))

    def peer_in(self, text: str) -> Peer | None:
        """Whom a library means, and, where others went before that one, who was the first."""
        self.note_closings()
        addresses = _addresses(text)
        with self._lock:
            named = next((p for one, p in self._known.values() if one.there in addresses), None)
            recent = [c for c in self._closings if c.at >= time.monotonic() - _SAME_FALL_S]
            first = [c.peer for c in recent if c.at == recent[0].at]
            if first:
                return named if named in first else first[0]
            return named or self._on_host(addresses)

    def _on_host(self, addresses: set[End]) -> Peer | None:
        hosts = {end.split()[0] for end in addresses}
        there = {peer for one, peer in self._known.values() if one.there.split()[0] in hosts}
        if len(there) == 1:
            return next(iter(there))
        names = {peer.host for peer in there}
        return Peer(host=next(iter(names))) if len(names) == 1 else None

    def host_of(self, rank: int) -> str:
        with self._lock:
            return self._hosts.get(rank, "")

    def cut_all(self) -> int:
        """To the other ranks and to the store, so that nobody waits for them any longer."""
        self._over.set()
        with self._lock:
            return cut([one for one, _peer in self._known.values()] + self._store_ends)


def _addresses(text: str) -> set[End]:
    """Those in a message. Gloo prints its ports with the two bytes in the wrong order."""
    found = set()
    for host, port in _ADDRESS.findall(text):
        number = int(port) & 0xFFFF
        swapped = (number & 0xFF) << 8 | number >> 8
        bare = host.removeprefix("::ffff:")
        found |= {f"{bare} {number}", f"{bare} {swapped}"}
    return found


def _port_of(store: Any) -> str:
    """Of the server behind it; connections to that one are no connections between ranks."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "port", os.environ.get("MASTER_PORT", "")))
