"""Kills the processes that ended ranks have left behind, and spares those of ranks that continue.

A sweep ends when nothing is left that it has to end. A process in a session of its own was made to survive its rank: it
may still save what the rank has sent it, so it has some time. So have the processes by which multiprocessing and torch
remove semaphores and shared memory: they end by themselves as soon as nobody uses these any more.

If ranks keep their processes over a failure (they are *kept*), the sweep must not touch anything of theirs. A process
belongs to a kept rank if it is below it, or in its session. What remains are processes in sessions of their own whose
parents have ended: the kernel no longer tells who started them. Two traces may show it: the log folder of a rank in the
environment, and the standard streams, which each rank has of its own. Without a trace the process is spared, because to
end the helper of a healthy rank is the worse error. The next sweep without kept ranks ends it.

Kept ranks wait for the end of a sweep. So with them it does not wait for the processes that have some time, and ends
these later.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from . import tree
from .process_stat import process_stat

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from .messages import Spawn, Sweep

_FOLDER = "DDP_RANK_DIR"
_Trace = str | tuple[int, int]  # a log folder, or device and inode of a stream


class Sweeper:
    """`over` receives the generation, and how many processes were left when the sweep began.

    `ranks` returns the pids of all ranks that live.
    """

    def __init__(self, over: Callable[[int, int], None], ranks: Callable[[], Iterable[int]]) -> None:
        self._over, self._ranks = over, ranks
        self._pid = os.getpid()
        self._sessions = {self._pid}  # of the zygote and its ranks: others were opened to survive them
        self._traces: dict[_Trace, int] = {}  # the rank (pid) that had it
        self._order: Sweep | None = None
        self._kept: frozenset[int] = frozenset()
        self._has_detached = False  # a sweep with kept ranks has left some, to be ended later
        self._spare_until = 0.0  # by then, detached processes have ended by themselves or are killed
        self._left_over = 0

    def rank_started(self, pid: int, order: Spawn, traces: Collection[_Trace]) -> None:
        self._sessions.add(pid)
        self._traces |= dict.fromkeys((*traces, *filter(None, (order.env.get(_FOLDER),))), pid)

    @property
    def is_active(self) -> bool:
        return self._order is not None

    @property
    def is_due(self) -> bool:
        return (self.is_active or self._has_detached) and time.monotonic() >= self._spare_until

    def wait_s(self) -> float | None:
        """The time until it is due. None: only the end of a process lets it continue."""
        left_s = self._spare_until - time.monotonic()
        return left_s if (self.is_active or self._has_detached) and left_s > 0 else None

    def begin(self, order: Sweep, kept: tuple[int, ...], unawaited: int) -> None:
        """`kept`: the pids of the ranks that continue. `unawaited`: how many keep stores or import on trial."""
        self._order, self._kept, self._has_detached = order, frozenset(kept), False
        self._spare_until = time.monotonic() + order.patience_s
        self._left_over = len(tree.descendants(self._pid, self._belongs_to_kept)) - unawaited
        self.sweep(unawaited)

    def sweep(self, unawaited: int) -> None:
        """Kill what is left. The end of each child calls this again, until nothing is left.

        This kills keepers of stores and trial imports too, but does not wait for them: the next store has its own port.
        """
        if self._order is None:
            return self._end_detached()
        spared: frozenset[int] = frozenset()
        if time.monotonic() < self._spare_until:
            spared = tree.in_other_sessions(self._pid, self._sessions) | tree.cleaners(self._pid)
        left = tree.kill_all(self._pid, spared, self._belongs_to_kept)
        detached = self._among(spared) if self._kept else []
        if left - len(detached) > unawaited:
            return
        generation, self._order = self._order.generation, None
        self._has_detached = bool(detached)
        self._sessions = {self._pid, *self._kept}
        self._forget_traces()
        self._over(generation, self._left_over)

    def _end_detached(self) -> None:
        """Kill the processes that have had their time. The ranks that have started meanwhile are kept too."""
        if not self._has_detached or time.monotonic() < self._spare_until:
            return
        self._kept = frozenset(self._ranks())
        late = self._among(tree.in_other_sessions(self._pid, self._sessions))
        for pid in late:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._has_detached = bool(late)
        self._forget_traces()

    def _among(self, pids: frozenset[int]) -> list[int]:
        """Return those of these processes that do not belong to a kept rank."""
        found = tree.descendants(self._pid, self._belongs_to_kept) if pids else []
        return [pid for pid in found if pid in pids]

    def _forget_traces(self) -> None:
        if not self._has_detached:
            self._traces = {trace: pid for trace, pid in self._traces.items() if pid in self._kept}

    def _belongs_to_kept(self, pid: int) -> bool:
        """Whether a process belongs to a kept rank, as far as this does not follow from its parent.

        It is asked while the processes are listed: a kept rank may start another one at any moment.
        """
        if not self._kept:
            return False
        stat = process_stat(pid)
        if pid in self._kept or stat is None or stat.session in self._kept:
            return True
        if stat.session in self._sessions or stat.parent != self._pid:
            return False
        owners = {self._traces[trace] for trace in _traces_of(pid) if trace in self._traces}
        return not owners or any(owner in self._kept for owner in owners)


def traces_of_streams(fds: tuple[int, ...]) -> tuple[_Trace, ...]:
    return tuple((stat.st_dev, stat.st_ino) for stat in map(os.fstat, fds))


def _traces_of(pid: int) -> set[_Trace]:
    found: set[_Trace] = set()
    for fd in (0, 1, 2):
        with suppress(OSError):
            stat = os.stat(f"/proc/{pid}/fd/{fd}")
            found.add((stat.st_dev, stat.st_ino))
    wanted = f"{_FOLDER}=".encode()
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        of_interest = (each for each in file.read().split(b"\0") if each.startswith(wanted))
        found |= {os.fsdecode(each[len(wanted) :]) for each in of_interest}
    return found
