"""The guard: one small thread in a rank that owns its process groups, for the launcher.

Theory of operation
-------------------
It tells the launcher at once what goes wrong in communication, and on the launcher's order it breaks all
groups off, so that a thread that is blocked in a collective comes back to Python: its `finally:` and its signal
handlers run, and the error that it gets says why.

    found out by itself   `get_error()` of NCCL groups, ten times a second; peers that have closed their connections
    told by others        a collective that failed (`tell`): our reducer and the tracing of collectives see those
    ordered               {"abort": reason}, {"dump": file}; over the socket that the launcher names in DDP_GUARD

What releases a thread depends on who blocks it. NCCL's and our own groups can be aborted. Gloo's `abort()` releases
nobody on CPUs; its sockets can be shut down instead, which makes the wait fail at once (see `peers.py`). Each
group is aborted in a thread of its own and none is waited for beyond the budget: where an abort hangs, the launcher
kills the process.

Nothing here imports torch: a script that never does has no groups. Without a launcher the thread still runs, since
it knows the names of lost peers. One guard per process, whoever starts it; a forked child has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any

from .collective_facts import spelled
from .peers import Peer, Peers

VARIABLE = "DDP_GUARD"
ABORT_BUDGET_S = 2.0
_WITH_NCCL_S = 0.1
_OTHERWISE_S = 1.0
_WORD_OF_LAUNCHER_S = 0.1
_MOST_TEXT = 2000
_GROUPS_DESCRIBED, _LONGEST_SPELLED = 64, 200

# The launcher's own start of a rank may have loaded this file before, under another name: there is one guard.
_first: Any = sys.modules.setdefault("_ddp_guard", sys.modules[__name__])
_guard: Guard | None = None


def start() -> Guard:
    """The guard of this process; it begins to look around with the first call."""
    found: Guard | None = _first._guard
    if found is None or found.pid != os.getpid():
        found = _first._guard = _first.Guard(os.environ.get(VARIABLE, ""))
        found.begin()
    return found


def running() -> Guard | None:
    found: Guard | None = _first._guard
    return found if found is not None and found.pid == os.getpid() else None


class Guard:
    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self._reason = ""  # why communication was broken off, once it was
        self._broken_off = threading.Event()
        self.peers = Peers()
        self._line = _connected(path)
        self._sending = threading.Lock()
        self._read = b""
        self._groups: tuple[Any, ...] = ()
        self._reported: set[int] = set()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="ddp-guard", daemon=True)

    def begin(self) -> None:
        self._send({"hello": _number("RANK"), "generation": _number("DDP_GENERATION"), "pid": self.pid})
        self._thread.start()
        # Before the interpreter takes threads apart: one that is in torch's code then would abort the process.
        threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def end(self) -> None:
        self._over = True
        self.wake()
        if self.pid == os.getpid():
            self._thread.join(1.0)
            self.peers.end()

    def wake(self) -> None:
        """There is a new group, or an old one is gone: look now."""
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"!")

    def awaited_reason(self) -> str:
        """Where peers were told to break off, this rank is about to be: their leaving is then no news."""
        if self._line is not None and not self._over:
            self._broken_off.wait(_WORD_OF_LAUNCHER_S)
        return self._reason

    # --- what is told --------------------------------------------------------------------------------

    def tell(self, text: str, doing: str = "", peer: Peer | None = None) -> None:
        """Never raises: it is called on the way of an error that matters more."""
        said: dict[str, Any] = {"text": text[:_MOST_TEXT], "doing": doing}
        if peer is not None:
            said |= {"peer": peer.rank, "host": peer.host}
        self._send({"error": said})

    def _send(self, message: dict[str, Any]) -> None:
        if self._line is None:
            return
        with self._sending, contextlib.suppress(OSError):
            self._line.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        poll.register(self.peers.fileno(), select.POLLIN)
        if self._line is not None:
            poll.register(self._line, select.POLLIN)
        while not self._over:
            nccl = self._look_at_groups()
            for fd, _events in poll.poll(1000 * (_WITH_NCCL_S if nccl else _OTHERWISE_S)):
                if fd == self._wake_r:
                    os.read(self._wake_r, 4096)
                elif fd == self.peers.fileno():
                    self.peers.note_closings()
                elif not self._listen():
                    poll.unregister(fd)

    def _look_at_groups(self) -> bool:
        """-> whether some of them are NCCL's"""
        registry = sys.modules.get("torch.distributed.distributed_c10d")
        world = getattr(registry, "_world", None)
        # A group is entered there a moment before it is the default one, and only then can peers be found by its store.
        groups = tuple(world.pg_map) if world is not None and world.default_pg is not None else ()
        new = [group for group in groups if not any(group is each for each in self._groups)]
        self._groups = groups
        if new and not self._reason:
            self.peers.new_groups()
        watched = [(group, each) for group in groups for each in _asynchronous(group)]
        for group, backend in watched:
            self._ask(group, backend)
        return bool(watched)

    def _ask(self, group: Any, backend: Any) -> None:
        with contextlib.suppress(Exception):  # a group that is being taken apart
            said = str(backend.get_error()).rpartition(".")[2]
            if said != "SUCCESS" and id(backend) not in self._reported:
                self._reported.add(id(backend))
                name = getattr(group, "group_name", "")
                self.tell(f"NCCL reports {said} in process group {name}", "asynchronous error")

    def _listen(self) -> bool:
        assert self._line is not None
        try:
            data = self._line.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(data)

    def _obey(self, order: dict[str, Any]) -> None:
        if "abort" in order:
            self.abort(str(order["abort"]))
        elif "dump" in order:
            self._send({"dumped": _dump(str(order["dump"])), "groups": _described(self._groups)})

    # --- breaking off --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Whoever waits in a collective is released, as far as that can be done from inside."""
        self._reason = self._reason or reason
        self._broken_off.set()
        began = time.monotonic()
        threads = [
            threading.Thread(target=_abort_one, args=(group,), name="ddp-abort", daemon=True)
            for group in self._groups
        ]
        for thread in threads:
            thread.start()
        n_cut = self.peers.cut_all()
        for thread in threads:
            thread.join(max(0.0, began + ABORT_BUDGET_S - time.monotonic()))
        hung = sum(thread.is_alive() for thread in threads)
        took_s = round(time.monotonic() - began, 3)
        self._send({"aborted": {"groups": len(threads), "cut": n_cut, "hung": hung, "took_s": took_s}})


def _abort_one(group: Any) -> None:
    with contextlib.suppress(Exception):
        group.abort()


def _asynchronous(group: Any) -> list[Any]:
    """The backends of a group that learn of errors while nobody asks."""
    found: list[Any] = []
    with contextlib.suppress(Exception):
        for device in group._device_types:
            if device.type == "cuda":
                backend = group._get_backend(device)
                if hasattr(backend, "get_error"):
                    found.append(backend)
    return found


def _described(groups: tuple[Any, ...]) -> list[tuple[str, int, str]]:
    """The name, the size and the ranks of each: the flight recorder does not know them of every group."""
    registry = sys.modules.get("torch.distributed.distributed_c10d")
    found = []
    for group in groups[:_GROUPS_DESCRIBED]:
        with contextlib.suppress(Exception):
            ranks = registry.get_process_group_ranks(group) if registry is not None else []
            told = spelled(ranks)
            found.append((str(group.group_name), len(ranks), told if len(told) <= _LONGEST_SPELLED else ""))
    return found


def _dump(path: str) -> str:
    """torch's flight recorder, into a file: which collectives were begun, and which of them are done. -> why not"""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return "torch.distributed is not there"
    try:
        nccl = getattr(c10d, "_dump_nccl_trace_json", None)
        data = (
            nccl(True, False) if nccl is not None and _uses_nccl() else c10d._dump_fr_trace_json(True, False)
        )
        partial = f"{path}.partial"
        with open(partial, "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
        os.replace(partial, path)
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _uses_nccl() -> bool:
    registry = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(registry, "_world", None)
    return world is not None and any(_asynchronous(group) for group in tuple(world.pg_map))


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else -1


def _connected(path: str) -> socket.socket | None:
    if not path:
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        line.settimeout(1.0)
        line.connect(path)
        line.setblocking(False)
    except OSError:  # the launcher is gone, or in another container
        line.close()
        return None
    return line
