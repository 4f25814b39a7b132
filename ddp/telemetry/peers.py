"""Which TCP connection of this process leads to which rank, and which connections the peer has closed.

Theory of operation
-------------------
Gloo, NCCL and our own ring do not expose their sockets. At best they report a lost peer by its address. But both ranks
of a connection see the same two addresses, in opposite order. So every rank writes the addresses of its connections
into the store that all ranks share. If rank 3 has written the pair (b, a), our connection (a, b) leads to rank 3. This
does not depend on how a library sets up its connections.

Once the peer of a connection is known, the kernel reports when the peer closes it, even if no thread waits for it at
that moment. The peer that closes first is the one that failed first. The other ranks fail later as a result.

A closed connection alone does not show that the peer has failed: a healthy rank closes those of a group that it
destroys, and the peer of a broken link is healthy too. So a peer is named only if its process has ended. If it runs in
our pid namespace, the kernel shows that. Otherwise it has ended if all connections to it are closed.

Shutting connections down releases the threads that wait for them. Gloo's sockets are shut down only for reading. When a
message of the peer lets Gloo's thread send, and this send fails, Gloo forgets the operation, and its caller waits for
the whole timeout of the group. With the direction for sending open, Gloo's thread sends what was asked for, then reads
the end of the stream, fails all its operations, and closes the socket. For the same reason a peer's sends must not fail
meanwhile. So a duplicate keeps the connection open until the next generation.

In worlds of more than `MAX_RANKS` ranks this would read too much from the store, so peers are not known. Gloo's
connections are shut down nevertheless: `GlooSockets` knows them without their peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from . import torch_api

# --- sockets of Gloo -------------------------------------------------------------------------------
#
# Which sockets of this process are Gloo's, also before it is known to which ranks they lead.
#
# Each group of Gloo has a thread that waits with an epoll of its own. So an epoll that appears while a group is being
# created belongs to Gloo, and so do the sockets in it. A script may have other ones: those of asyncio, or of gRPC.
#
# The number of a descriptor is used again once the group is gone. An epoll counts as the same one only if it still
# has a socket that it had when its group was created.
#
# Gloo leaves a message unread if its receiver has given up the memory for it, and a message unsent if its sender
# has. The kernel reports such a socket again and again, so Gloo's thread uses a whole core until the group is
# destroyed, which the script may never do. `report_once` lets the kernel report it once more, and then only what is
# new.

_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_ENTRY = re.compile(
    r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)\s+pos:\s*\S+\s+ino:\s*([0-9a-f]+)",
    re.MULTILINE,
)
_CHANGE = 3  # EPOLL_CTL_MOD
_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # struct epoll_event: events, data


class GlooSockets:
    def __init__(self) -> None:
        self._noted: dict[int, frozenset[int]] = {}  # by the descriptor of an epoll: inodes of its sockets
        self._before: list[set[int]] = []  # for each group that is being created: the epolls before it

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """A group is created within, perhaps one of Gloo."""
        before = epolls()
        self._before.append(before)
        try:
            yield
            for epoll in epolls() - before:
                self._noted[epoll] = frozenset(_inodes(watched(epoll)))
        finally:
            self._before[:] = [each for each in self._before if each is not before]

    def now(self) -> set[int]:
        """The descriptors that are watched for Gloo."""
        return set[int]().union(*map(watched, self._epolls()))

    def _epolls(self) -> Iterator[int]:
        earlier, noted = list(self._before), self._noted
        for epoll in epolls():
            is_new = any(epoll not in before for before in earlier)
            if is_new or noted.get(epoll, frozenset()).intersection(_inodes(watched(epoll))):
                yield epoll

    def report_once(self, sockets: set[int]) -> None:
        """Let Gloo's epolls report what these sockets have for it once, not all the time. `sockets`: inodes."""
        for epoll in self._epolls():
            for descriptor, events, data, inode in _entries(epoll):
                if inode in sockets:
                    event = struct.pack(_EVENT, events | select.EPOLLET, data)
                    ctypes.CDLL(None).epoll_ctl(epoll, _CHANGE, descriptor, event)  # fails if it is closed

    def forget(self) -> None:
        self._noted = {}


def epolls() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def watched(epoll: int) -> set[int]:
    """The descriptors that this process watches with an epoll."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as file:
        return set(map(int, _WATCHED.findall(file.read())))
    return set()


def _entries(epoll: int) -> list[tuple[int, int, int, int]]:
    """For each descriptor in an epoll: its number, the events, the data that belongs to it, and its inode."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as file:
        found = _ENTRY.findall(file.read())
        return [
            (int(fd), int(events, 16), int(data, 16), int(inode, 16)) for fd, events, data, inode in found
        ]
    return []


def _inodes(descriptors: Iterable[int]) -> Iterator[int]:
    for each in descriptors:
        with contextlib.suppress(OSError):
            yield os.fstat(each).st_ino


# --- peers -----------------------------------------------------------------------------------------

MAX_RANKS = 256
_RETRY_AFTER_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # other ranks may not have written theirs yet
_SAME_FAILURE_S = 5.0  # a connection that closed at most this long before a failure belongs to it
_ENDS_WITHIN_S = 0.2  # a process that ends closes its connections one by one
_EXITING = 0x4  # PF_EXITING of the kernel
_GLOO_CLOSES_WITHIN_S = 0.25  # an idle machine needs 1 ms
_LOOK_EVERY_S = 0.001
_ADDRESS = re.compile(r"\[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F]*:[0-9a-fA-F:.]+)\]?[:<](\d{1,5})")
_KEY = "ddp/peers/"

End = str  # "10.0.0.1 4711"


@dataclass(frozen=True, slots=True)
class PeerSocket:
    fd: int
    inode: int
    here: End
    there: End


@dataclass(frozen=True, slots=True)
class Peer:
    """The rank at the other end of a connection."""

    rank: int
    host: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (on {self.host})" if self.host else "")


@dataclass(frozen=True, slots=True)
class Closing:
    at: float
    peer: Peer
    inode: int


def _end(address: Any) -> End:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"


def connections() -> list[PeerSocket]:
    """Return the established TCP connections of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = _read_connection(int(name))
                if one is not None:
                    found.append(one)
    return found


def _read_connection(fd: int) -> PeerSocket | None:
    with socket.socket(fileno=os.dup(fd)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
            return None
        return PeerSocket(fd, os.fstat(fd).st_ino, _end(end.getsockname()), _end(end.getpeername()))


def shut_down(connections: list[PeerSocket], ours: int = -1) -> tuple[int, list[socket.socket]]:
    """Shut connections down, which releases their waiting threads; return how many, and duplicates to keep open.

    `ours`: an epoll of this module, which does not make a connection one of Gloo's.
    """
    # The descriptors that a thread of this process watches with epoll, as Gloo's does. NCCL and our core do not.
    polled = set[int]().union(*map(watched, epolls() - {ours}))
    n_cut, held = 0, list[tuple[PeerSocket, socket.socket]]()
    for one in connections:
        is_gloos = one.fd in polled
        end = _shut_down(one, socket.SHUT_RD if is_gloos else socket.SHUT_RDWR)
        if end is None:
            continue
        n_cut += 1
        if is_gloos:
            held.append((one, end))
        else:
            end.close()
    _await_gloo(held)
    return n_cut, [end for _one, end in held]


def _shut_down(one: PeerSocket, how: int) -> socket.socket | None:
    """Return a duplicate. A descriptor that the process has reused for another file is left alone."""
    with contextlib.suppress(OSError):
        end = socket.socket(fileno=os.dup(one.fd))
        try:
            if os.fstat(end.fileno()).st_ino == one.inode:
                end.shutdown(how)
                return end
            end.close()
        except OSError:
            end.close()
    return None


def _await_gloo(held: list[tuple[PeerSocket, socket.socket]]) -> None:
    """Until Gloo has closed its sockets. Those of others, who also use epoll, are then shut down for sending, too."""
    give_up_at = time.monotonic() + _GLOO_CLOSES_WITHIN_S
    while (waiting := [each for each in held if _is_open(each[0])]) and time.monotonic() < give_up_at:
        time.sleep(_LOOK_EVERY_S)
    for _one, end in waiting:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _is_open(one: PeerSocket) -> bool:
    try:
        return os.fstat(one.fd).st_ino == one.inode
    except OSError:
        return False


class Peers:
    """The connections of this process, and the ranks at their other ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[PeerSocket, Peer]] = {}  # by inode
        self._store_ends: list[PeerSocket] = []
        self._held: list[socket.socket] = []  # duplicates of Gloo's sockets that were shut down
        self._cut: set[int] = set()  # by inode, in this generation
        self.gloo = GlooSockets()
        self._hosts: dict[int, str] = {}
        self._processes: dict[int, Any] = {}  # by rank: see _process
        self._mine: list[Any] = []
        self._closings: list[Closing] = []
        self._closed = select.epoll()
        self._has_work = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._closed.fileno()

    # --- identifying peers ---------------------------------------------------------------------------

    def identify(self) -> None:
        """Identify the peers of new connections, in the background. Call this when there are new groups."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp-peers", daemon=True)
            self._thread.start()
        self._has_work.set()

    def end(self) -> None:
        """End the thread before the interpreter shuts down.

        A thread inside torch's code would then abort the process.
        """
        self._stopped.set()
        self._has_work.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while self._has_work.wait() and not self._stopped.is_set():
            self._has_work.clear()
            with contextlib.suppress(
                Exception
            ):  # the store is gone or a group was destroyed: peers stay unknown
                self._exchange()

    def _exchange(self) -> None:
        """Write the addresses of our connections to the store, and read those of the other ranks."""
        import torch.distributed as dist

        if not dist.is_initialized() or not 1 < dist.get_world_size() <= MAX_RANKS:
            return
        rank, world, store = dist.get_rank(), dist.get_world_size(), torch_api.default_store()
        others = [other for other in range(world) if other != rank]
        mine = self._publish(store, rank)
        for pause in _RETRY_AFTER_S:
            if self._stopped.is_set() or self._has_work.is_set() or any_is_closed(self._store_ends):
                return
            if store.check([f"{_KEY}{other}" for other in others]):
                values = store.multi_get([f"{_KEY}{other}" for other in others])
                self._match(
                    mine, {other: json.loads(value) for other, value in zip(others, values, strict=True)}
                )
                if len(self._known) >= len(mine):
                    return
            self._stopped.wait(pause)

    def _publish(self, store: Any, rank: int) -> list[PeerSocket]:
        found = connections()
        port = _port_of(store)
        to_ranks = [one for one in found if port not in (one.here.split()[1], one.there.split()[1])]
        with self._lock:
            self._store_ends = [one for one in found if one not in to_ranks]
        ends = [[one.here, one.there] for one in to_ranks]
        self._mine = _process()
        entry = {"host": socket.gethostname(), "ends": ends, "process": self._mine}
        store.set(f"{_KEY}{rank}", json.dumps(entry))
        return to_ranks

    def _match(self, mine: list[PeerSocket], entries: dict[int, Any]) -> None:
        owners = {(here, there): rank for rank, entry in entries.items() for here, there in entry["ends"]}
        with self._lock:
            self._hosts = {rank: entry["host"] for rank, entry in entries.items()}
            self._processes = {rank: entry.get("process") for rank, entry in entries.items()}
            for one in mine:
                rank = owners.get((one.there, one.here))
                known = self._known.get(one.inode)
                if rank is None or (known is not None and known[0] == one):
                    continue
                self._known[one.inode] = (one, Peer(rank, self._hosts[rank]))
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._closed.register(one.fd, select.EPOLLRDHUP | select.EPOLLET)

    # --- lost peers ----------------------------------------------------------------------------------

    def note_closings(self) -> None:
        """Read from the kernel which connections have been closed. A failed collective calls this as well."""
        events = self._closed.poll(0)
        at = time.monotonic()
        with self._lock:
            by_fd = {one.fd: (one, peer) for one, peer in self._known.values()}
            for fd, _what in events:
                if fd in by_fd:
                    one, peer = by_fd[fd]
                    self._closings.append(Closing(at, peer, one.inode))

    def peer_in(self, text: str) -> Peer | None:
        """Return the peer that failed first, if its process has ended. `text`: the error, which may have an address."""
        give_up_at = time.monotonic() + _ENDS_WITHIN_S
        while True:
            self.note_closings()
            with self._lock:
                suspects = self._suspects(text)
                ended = next((peer for peer in suspects if self._has_ended(peer)), None)
            if ended is not None or not suspects or time.monotonic() >= give_up_at:
                return ended
            time.sleep(_LOOK_EVERY_S)

    def _suspects(self, text: str) -> list[Peer]:
        """Peers that have closed a connection, the first one first, then the peer whose address is in the text."""
        addresses = _addresses(text)
        named = {peer for one, peer in self._known.values() if one.there in addresses}
        recent = [c for c in self._closings if c.at >= time.monotonic() - _SAME_FAILURE_S]
        ordered = sorted(recent, key=lambda c: (c.at, c.peer not in named))
        return [*(c.peer for c in ordered), *(named if len(named) == 1 else ())]

    def _has_ended(self, peer: Peer) -> bool:
        process = self._processes.get(peer.rank)
        if process and self._mine and process[:2] == self._mine[:2]:
            return _ended(*process[2:])
        closed = {closing.inode for closing in self._closings}
        return all(
            one.inode in closed or not _is_open(one) for one, p in self._known.values() if p.rank == peer.rank
        )

    def forget_closed(self) -> None:
        """Forget the connections that are closed here: those of a group that was destroyed."""
        with self._lock:
            self._known = {inode: each for inode, each in self._known.items() if _is_open(each[0])}
            self._closings = [closing for closing in self._closings if closing.inode in self._known]

    def host_of(self, rank: int) -> str:
        with self._lock:
            return self._hosts.get(rank, "")

    def shut_down_all(self) -> int:
        """Shut down the connections to the other ranks and to the store, which releases all threads that wait there.

        Called again, it shuts down those that were not there before.
        """
        self._stopped.set()
        with self._lock:
            ends = [one for one, _peer in self._known.values()] + self._store_ends
        known = {one.inode for one in ends}
        # A thread may be forming the first groups: their store is not known to torch yet. And the ranks at the other
        # ends of Gloo's connections may not be known yet, or never.
        port, gloos = os.environ.get("MASTER_PORT", ""), self.gloo.now()
        others = [
            one
            for one in connections()
            if one.inode not in known and (port == one.there.split()[1] or one.fd in gloos)
        ]
        new = [one for one in ends + others if one.inode not in self._cut]
        n_cut, held = shut_down(new, self._closed.fileno()) if new else (0, [])
        if held:
            self.gloo.report_once({os.fstat(end.fileno()).st_ino for end in held})
        with self._lock:
            self._cut.update(one.inode for one in new)
            self._held += held
        return n_cut

    def begin_again(self) -> None:
        """Forget the connections of the last generation, which are shut down."""
        with self._lock:
            self._known.clear()
            self._hosts.clear()
            self._processes.clear()
            self._closings.clear()
            self._store_ends = []
            self._cut.clear()
            self.gloo.forget()
            held, self._held = self._held, []
        for end in held:
            end.close()
        self._stopped.clear()


def _process() -> list[Any]:
    """This process, so that others on this machine find it: kernel, pid namespace, pid, start; [] if unknown."""
    with contextlib.suppress(OSError):
        return [boot_id(), os.readlink("/proc/self/ns/pid"), os.getpid(), _stat(os.getpid())[19]]
    return []


def boot_id() -> str:
    """Tells this running kernel from those of other machines, and from an earlier one. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _ended(pid: int, started: int) -> bool:
    try:
        found = _stat(pid)
    except OSError:
        return True
    return found[19] != started or bool(found[6] & _EXITING)


def _stat(pid: int) -> list[int]:
    """The fields of /proc/PID/stat, from the state on, which is 0 here."""
    with open(f"/proc/{pid}/stat") as file:
        return [0, *map(int, file.read().rpartition(")")[2].split()[1:])]


def any_is_closed(ends: list[PeerSocket]) -> bool:
    """Whether one is closed or being closed. torch prints a warning when it uses such a connection to a store."""
    poll = select.poll()
    for end in ends:
        poll.register(end.fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def _addresses(text: str) -> set[End]:
    """Return the addresses in a message. Gloo prints ports with their two bytes swapped, so both orders are tried."""
    found = set()
    for host, port in _ADDRESS.findall(text):
        number = int(port) & 0xFFFF
        swapped = (number & 0xFF) << 8 | number >> 8
        bare = host.removeprefix("::ffff:")
        found |= {f"{bare} {number}", f"{bare} {swapped}"}
    return found


def _port_of(store: Any) -> str:
    """Return the port of the store's server; connections to it do not lead to a rank."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "port", os.environ.get("MASTER_PORT", "")))
