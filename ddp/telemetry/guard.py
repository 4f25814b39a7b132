"""The guard: one small thread in a rank that watches its process groups, for the launcher.

Theory of operation
-------------------
The guard reports failures of communication to the launcher at once. When the launcher requests it, the guard aborts all
groups. Then a thread that is blocked in a collective returns to Python, and its `finally:` blocks and signal handlers
run. The error that it gets contains the reason.

    polled      `get_error()` of NCCL groups and others like it, ten times per second; peers that have closed their
                connections
    reported    a failed collective (`report`), by our reducer or by the tracing of collectives
    requested   {"abort": reason}, {"dump": file}, {"pause": ...}, {"continue": ...}, over the socket that the launcher
                names in DDP_GUARD

A rank whose loop can begin again in the same process (`State.run` of ddp.elastic) says so: {"heals": true}. After a
failure of another rank, the launcher pauses it instead of ending it: the guard aborts its groups, the loop *parks*, and
the launcher sends it the environment of the next generation. See docs/elastic.md.

The section on release says how threads are released. A rank that is paused is released again and again until it has
parked. If an abort hangs, the launcher kills the process.

Nothing here imports torch: a script that does not import it has no groups. The thread also runs without a launcher,
because it finds the names of lost peers. A process has one guard. A forked child does not have one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import profiling, torch_api
from .blocked_thread import BlockedThread
from .collective_marks import format_ranks
from .contracts import GENERATION, GUARD
from .observing import Observer
from .peers import Peer, Peers

# --- own descriptors -------------------------------------------------------------------------------
#
# Descriptors that an observer holds in the process of a script.
#
# A program may close every descriptor that it does not know, as daemons do, and open files of its own under the same
# numbers. An observer that goes on to use these numbers reads what is not its own, and writes into it.


class OwnDescriptors:
    def __init__(self, *fds: int) -> None:
        self._identities = {fd: _identity(fd) for fd in fds}

    def are_open(self) -> bool:
        """Whether all of them are what they were."""
        try:
            return all(_identity(fd) == known for fd, known in self._identities.items())
        except OSError:
            return False


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


# --- release of threads that wait in a collective --------------------------------------------------
#
# Release the threads of this rank that wait in a collective.
#
# Theory of operation
# -------------------
# How a thread can be released depends on the library that blocks it. NCCL's groups and our own can be aborted.
# Gloo's `abort()` does not release threads on CPUs, but shutting down its sockets does (see `peers.py`). Each group
# is aborted in a thread of its own, and all of them together may take `ABORT_BUDGET_S`.
#
# One attempt may not be enough. A group that the script is just creating is not in torch's tables yet, and its
# members wait for each other as soon as it is. A rank that enters a collective of such a group waits for ranks that
# have parked already. So the attempt is repeated until the rank has parked: with the groups that are in the tables
# then, and with the connections that are known then. The intervals grow, because a rank may also be computing.
#
# A collective of Gloo can be beyond release (`blocked_thread.py`). Then this process ends, so that the launcher
# starts another one in its place at once. The other survivors keep theirs.
#
# All of this runs on the guard's thread. The order to continue comes through the same thread and ends the
# repetition, so a group of the next generation is never aborted.

ABORT_BUDGET_S = 2.0
_AGAIN_AFTER_S, _AT_MOST_S = 0.1, 0.5
_NEVER = float("inf")


class Release:
    """What the guard of a rank does to release its threads."""

    def __init__(self, peers: Peers, asynchronous_backends: Callable[[Any], list[Any]]) -> None:
        self._peers = peers
        self._asynchronous_backends = asynchronous_backends
        self._aborting: list[tuple[Any, threading.Thread]] = []
        self._interval_s = _AGAIN_AFTER_S
        self._again_at = _NEVER
        self._thread: BlockedThread | None = None

    def watch_this_thread(self, on: bool) -> None:
        """It is the one that parks."""
        self._thread = BlockedThread() if on else None

    def begin(self) -> dict[str, Any]:
        """Abort all groups, and return the report to the launcher."""
        began = time.monotonic()
        self._aborting = [(group, _start_abort(group)) for group in torch_api.groups()]
        n_cut = self._peers.shut_down_all()
        for _group, thread in self._aborting:
            thread.join(max(0.0, began + ABORT_BUDGET_S - time.monotonic()))
        hung = sum(thread.is_alive() for _group, thread in self._aborting)
        took_s = round(time.monotonic() - began, 3)
        return {"groups": len(self._aborting), "cut": n_cut, "hung": hung, "took_s": took_s}

    # --- until the rank has parked -------------------------------------------------------------------

    def repeat(self) -> None:
        self._interval_s = _AGAIN_AFTER_S
        self._again_at = time.monotonic() + self._interval_s

    def due_in_s(self) -> float:
        return max(0.0, self._again_at - time.monotonic())

    def go_on(self) -> None:
        """Repeat the attempt if it is time to."""
        if time.monotonic() < self._again_at:
            return
        self._interval_s = min(2 * self._interval_s, _AT_MOST_S)
        self._again_at = time.monotonic() + self._interval_s
        for group in torch_api.groups():
            if self._may_abort_again(group):
                self._aborting.append((group, _start_abort(group)))
        self._peers.shut_down_all()
        thread = self._thread
        if thread is not None and self._is_on_cpus() and (where := thread.look()):
            _end_process(where)

    def end(self) -> None:
        """The rank has left all collectives, or is ordered to continue."""
        self._again_at = _NEVER
        self._aborting = []
        if (thread := self._thread) is not None:
            thread.forget()

    def _is_on_cpus(self) -> bool:
        """Otherwise a thread may be blocked because a device computes."""
        return not any(map(self._asynchronous_backends, torch_api.groups()))

    def _may_abort_again(self, group: Any) -> bool:
        """Our groups and Gloo's: the object stays when its members are replaced. Others may not bear a second abort."""
        before = [thread for each, thread in self._aborting if each is group]
        if any(thread.is_alive() for thread in before):
            return False
        return not before or not self._asynchronous_backends(group)


def _start_abort(group: Any) -> threading.Thread:
    thread = threading.Thread(target=_abort, args=(group,), name="ddp-abort", daemon=True)
    thread.start()
    return thread


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):
        group.abort()


def _end_process(where: str) -> None:
    words = (
        f"ddp: rank {os.environ.get('RANK', '?')} cannot leave {where}: the collective has not ended although its "
        "connections are shut down. This process ends, and the launcher starts a new one\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, words.encode())
    os._exit(1)


# --- the guard -------------------------------------------------------------------------------------

ASYNCHRONOUS = "asynchronous error"  # the launcher reports these at once, because no call raises them
_POLL_ERRORS_S = 0.1
_POLL_S = 1.0
_WAIT_FOR_REASON_S = 0.1
_MAX_TEXT = 2000
_MAX_GROUPS, _MAX_RANKS_TEXT = 64, 200
# These raise their errors in the call that fails. Gloo has `get_error()` nevertheless, from 2.14 on.
_SYNCHRONOUS = ("gloo", "mpi", "ucc", "fake", "shm", "hier")

# The launcher may have loaded this file before, under another name. Both copies share one guard.
_first: Any = sys.modules.setdefault("_ddp_guard", sys.modules[__name__])
_guard: Guard | None = None


def start() -> Guard:
    """Return the guard of this process; the first call starts it."""
    found: Guard | None = _first._guard
    if found is None or found.pid != os.getpid():
        found = _first._guard = _first.Guard(os.environ.get(GUARD, ""))
        found.begin()
    return found


def running() -> Guard | None:
    """Return the guard of this process if it has been started."""
    found: Guard | None = _first._guard
    return found if found is not None and found.pid == os.getpid() else None


def creating_group() -> contextlib.AbstractContextManager[None]:
    """A group is created within: its sockets must be known before its peers are."""
    found = running()
    return contextlib.nullcontext() if found is None else found.peers.gloo.creating()


def cannot_heal(reason: str) -> None:
    """Tell the launcher that this process cannot go on with survivors, or as one of them."""
    start().cannot_heal(reason)


def why_broken(*, ask: bool = False) -> str:
    """Say why results of collectives may be garbage; "" if they are valid.

    NCCL ends an aborted collective without an error, and its output is whatever was in memory. `ask`: ask the backends
    now, instead of relying on what the thread has seen last.
    """
    found = running()
    if found is None:
        return ""
    return found.find_broken() if ask else found.broken


@dataclass(frozen=True, slots=True)
class Continue:
    """The generation in which this process goes on, and the variables that differ in it."""

    generation: int
    environment: dict[str, str]


class Guard:
    """The guard of this process."""

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self._reason = ""  # why communication was aborted; empty before
        self._aborted = threading.Event()
        self.peers = Peers()
        self._socket = _connect(path)
        self.has_agent = self._socket is not None
        self._send_lock = threading.Lock()
        self._received = b""
        self._release = Release(self.peers, _asynchronous_backends)
        self._groups: tuple[weakref.ref[Any], ...] = ()  # a group ends when the script has destroyed it
        self._watched: list[tuple[Any, Any]] = []  # groups with their asynchronous backends
        self.broken = ""  # why results of collectives may be garbage
        self._heals = False
        self._saves = self._has_left = False
        self._paused_in = -1  # the generation in which the launcher has paused this process
        self._paused = threading.Condition()
        self._orders: queue.SimpleQueue[Continue] = queue.SimpleQueue()
        self._reported: set[int] = set()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        sockets = () if self._socket is None else (self._socket.fileno(),)
        self._own = OwnDescriptors(self._wake_r, self._wake_w, self.peers.fileno(), *sockets)
        self._stopped = False
        self._thread = threading.Thread(
            target=Observer("the guard of process groups").guarded(self._run), name="ddp-guard", daemon=True
        )

    def begin(self) -> None:
        self._send(self._hello())
        self._thread.start()
        # End before the interpreter stops threads: a thread inside torch's code would then abort the process.
        threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def end(self) -> None:
        self._stopped = True
        self.wake()
        if self.pid == os.getpid():
            self._thread.join(1.0)
            self._watched = []
            self.peers.end()

    def wake(self) -> None:
        """Make the thread check the groups now, because one was added or removed."""
        with contextlib.suppress(OSError):
            if self._own.are_open():
                os.write(self._wake_w, b"!")

    def wait_for_reason(self) -> str:
        """Wait briefly for the launcher's reason.

        The peer may have exited because it got the same abort request earlier.
        """
        if self._socket is not None and not self._stopped:
            self._aborted.wait(_WAIT_FOR_REASON_S)
        return self._reason

    def find_broken(self) -> str:
        """Return why results may be garbage. Only present groups count: a script may have replaced a broken one."""
        if self._aborted.is_set():
            return f"the launcher aborted communication: {self._reason}"
        for group, backend in self._watched:
            status = _status(backend)
            if status != "SUCCESS" and any(group is each for each in torch_api.groups()):
                return _error_text(backend.name(), status, getattr(group, "group_name", ""))
        return ""

    def _hello(self) -> dict[str, Any]:
        hello = {"hello": _number("RANK"), "generation": _number(GENERATION), "pid": self.pid}
        return hello | ({"heals": True} if self._heals else {})

    # --- healing: the same process in the next generation ----------------------------------------------

    def heals(self, on: bool) -> None:
        """Tell the launcher whether this process can go on in another generation: the thread that calls this parks."""
        self._heals = on
        self._release.watch_this_thread(on)
        self._send({"heals": on})

    def cannot_heal(self, reason: str) -> None:
        self._heals = False
        self._send({"cannot_heal": reason[:_MAX_TEXT]})

    def will_pause(self, within_s: float) -> bool:
        """Wait until the launcher pauses this process; False if it does not within this time."""
        if not self._heals or self._socket is None:
            return False
        generation = _number(GENERATION)
        with self._paused:
            return self._paused.wait_for(lambda: self._paused_in == generation, within_s)

    @property
    def is_healing(self) -> bool:
        return self._heals

    def saves(self) -> None:
        """The thread that calls this has work to do when its collectives are aborted (`ddp.on_failure`)."""
        self._saves = True
        self._release.watch_this_thread(True)

    def leave_collectives(self) -> None:
        """This process is outside of all collectives for good, and its connection to the store must stay."""
        self._has_left = True
        self._release.end()

    def park(self) -> Continue:
        """Wait, outside of all collectives, for the next generation."""
        self._release.end()
        self._send({"parked": {"generation": _number(GENERATION)}})
        return self._orders.get()

    def go_on(self) -> None:
        """Begin the generation that is now in the environment."""
        with self._paused:
            if self._paused_in != _number(GENERATION):  # otherwise that one is over as well
                self._reason, self.broken = "", ""
                self._aborted.clear()
                self.peers.begin_again()
        self._reported.clear()
        self._send(self._hello())

    # --- reports to the launcher ---------------------------------------------------------------------

    def report(self, text: str, doing: str = "", peer: Peer | None = None) -> None:
        """Report an error. Never raises, because the caller is about to raise the error itself."""
        error: dict[str, Any] = {"text": text[:_MAX_TEXT], "doing": doing}
        if peer is not None:
            error |= {"peer": peer.rank, "host": peer.host}
        self._send({"error": error})

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is None or not self._own.are_open():
            return
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        poll.register(self.peers.fileno(), select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN)
        while not self._stopped:
            has_asynchronous = self._check_groups()
            interval_s = _POLL_ERRORS_S if has_asynchronous else _POLL_S
            ready = poll.poll(1000 * min(interval_s, self._release.due_in_s()))
            if not self._own.are_open():  # the program has closed them, and may use their numbers
                return
            for fd, _events in ready:
                if fd == self._wake_r:
                    os.read(self._wake_r, 4096)
                elif fd == self.peers.fileno():
                    self.peers.note_closings()
                elif not self._receive():
                    poll.unregister(fd)
            self._release.go_on()

    def _check_groups(self) -> bool:
        """Return whether a group has a backend that detects errors asynchronously, as NCCL does."""
        groups = torch_api.groups() if torch_api.has_default_group() else ()
        known = [each() for each in self._groups]
        new = [group for group in groups if not any(group is each for each in known)]
        if len(groups) < len(self._groups) + len(new):  # one was destroyed
            self.peers.forget_closed()
        self._groups = tuple(map(weakref.ref, groups))
        if new and not self._reason:
            self.peers.identify()
        self._watched = [(group, each) for group in groups for each in _asynchronous_backends(group)]
        for group, backend in self._watched:
            self._check_backend(group, backend)
        self.broken = self.find_broken()
        return bool(self._watched)

    def _check_backend(self, group: Any, backend: Any) -> None:
        status = _status(backend)
        if status != "SUCCESS" and id(backend) not in self._reported:
            self._reported.add(id(backend))
            self.report(_error_text(backend.name(), status, getattr(group, "group_name", "")), ASYNCHRONOUS)

    def _receive(self) -> bool:
        """Handle the launcher's requests; return whether the connection is open."""
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return bool(data)

    def _handle(self, request: dict[str, Any]) -> None:
        if "abort" in request:
            self.abort(str(request["abort"]))
        elif "pause" in request:
            self._release.repeat()
            with self._paused:
                self._paused_in = int(request["pause"]["generation"])
                self._paused.notify_all()
            self.abort(str(request["pause"]["reason"]))
        elif "continue" in request:
            self._release.end()
            order = request["continue"]
            self._orders.put(Continue(int(order["generation"]), dict(order["env"])))
        elif "dump" in request:
            self._send(
                {
                    "dumped": _dump(str(request["dump"])),
                    "groups": _describe(
                        tuple(group for each in self._groups if (group := each()) is not None)
                    ),
                }
            )
        elif "profile" in request:
            self._profile(request["profile"])

    def _profile(self, wanted: dict[str, Any] | None) -> None:
        if wanted is None:
            profiling.withdraw()
            return

        def report(problem: str, steps: int) -> None:
            self._send({"profiled": problem[:_MAX_TEXT], "steps": steps})

        profiling.request(float(wanted["seconds"]), str(wanted["path"]), report)

    # --- abort ---------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Release all threads that wait in a collective, as far as this is possible from inside the process."""
        self._reason = self._reason or reason
        self._aborted.set()
        self.broken = self.find_broken()
        if self._has_left:
            return
        if self._saves:
            self._release.repeat()
        self._send({"aborted": self._release.begin()})


def _status(backend: Any) -> str:
    with contextlib.suppress(Exception):  # the group is being destroyed
        return str(backend.get_error()).rpartition(".")[2]
    return "SUCCESS"


def _error_text(backend: str, status: str, group: str) -> str:
    """Describe the state that torch's watchdog has set. The watchdog writes the error itself only to stderr."""
    if status == "TIMEOUT":  # the launcher recognizes torch's own words
        return f"Watchdog caught collective operation timeout in process group {group} ({backend.upper()})"
    return f"{backend.upper()} reports {status} in process group {group}"


def _asynchronous_backends(group: Any) -> list[Any]:
    """Return the backends of a group that detect errors asynchronously, for any type of device."""
    found: list[Any] = []
    with contextlib.suppress(Exception):
        for device in torch_api.device_types(group):
            backend = torch_api.backend_of(group, device)
            if any(backend is each for each in found) or not hasattr(backend, "get_error"):
                continue
            if backend.name() not in _SYNCHRONOUS:
                found.append(backend)
    return found


def _describe(groups: tuple[Any, ...]) -> list[tuple[str, int, str]]:
    """Return name, size and ranks of each group, because the flight recorder does not have them for every group."""
    registry = sys.modules.get("torch.distributed.distributed_c10d")
    found = []
    for group in groups[:_MAX_GROUPS]:
        with contextlib.suppress(Exception):
            ranks = registry.get_process_group_ranks(group) if registry is not None else []
            text = format_ranks(ranks)
            found.append((str(group.group_name), len(ranks), text if len(text) <= _MAX_RANKS_TEXT else ""))
    return found


def _dump(path: str) -> str:
    """Write torch's flight recorder, the last collectives and their states, to a file; return an error or ""."""
    if not torch_api.is_loaded():
        return "torch.distributed is not available"
    try:
        # A group can have Gloo beside NCCL, and each numbers its own calls: one of the two is read.
        names = {backend.name() for group in torch_api.groups() for backend in _asynchronous_backends(group)}
        data = torch_api.record_of_collectives(names or {"gloo"})
        partial = f"{path}.partial"
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else -1


def _connect(path: str) -> socket.socket | None:
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(1.0)
        connection.connect(path)
        connection.setblocking(False)
    except OSError:  # the launcher is gone, or runs in another container
        connection.close()
        return None
    return connection
