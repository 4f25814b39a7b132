"""The pages of this node's ranks: creates them, passes their path to the rank, and reads them without blocking it.

A page is anonymous memory. A rank opens it through /proc/<agent>/fd, so no file remains when the agent ends. Ranks
without a page run normally. A view holds the data of the page and of /proc. The page and the last view are kept after
the rank has ended.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from launcher.health import page
from launcher.template.cgroup import folders
from launcher.template.contracts import (
    RING_AT,
    SIZE,
    STATUS_PAGE,
    TRACE_COLLECTIVES,
    VALUES_AT,
    VALUES_COUNTER,
    VALUES_END,
    VALUES_ROOM,
    ring_lines,
)
from launcher.template.tree import process_stat
from rendezvous.values.rank_view import NO_REPEAT, ProcessView, RankPhase, RankView, Repeat
from rendezvous.values.types import Reached

_IDLE_SHARE = 0.02  # of a CPU: a process that only waits uses at most this much, with all its threads
_IDLE_S = (
    0.015  # and at most this much between two readings, because of the resolution of the kernel's counter
)

_MAY_BE_WAITING = (RankPhase.BACKWARD, RankPhase.COMMUNICATE)
_AT_REST = ("S", "D")  # a frozen process shows either, depending on the cgroup version
_MOST_UNREAD = 4096
_SHORTEST_S = 0.5  # the kernel counts CPU time in steps of 10 ms


@dataclass(slots=True)
class _Sheet:
    rank: int
    fd: int
    memory: mmap.mmap
    pid: int = 0
    alive: bool = True
    seen: page.PageCopy = page.NOTHING
    cpu_s: float = 0.0
    looked_at: float = 0.0
    process: ProcessView = field(default_factory=ProcessView)
    values_read: int = 0  # bytes of what the script has logged


class Pages:
    def __init__(self, *, trace_collectives: bool = True) -> None:
        self._wishes = TRACE_COLLECTIVES if trace_collectives else 0
        self._sheets: dict[int, _Sheet] = {}
        self._done_with_others = 0
        self._unread: list[tuple[int, bytes]] = []  # of processes that have ended
        self._lock = Lock()

    def open(self, local_rank: int, rank: int, repeat: Repeat = NO_REPEAT) -> dict[str, str]:
        """Create a page. Return the environment variable for its rank, or {} if the page cannot be created."""
        self.close(local_rank)
        try:
            fd = os.memfd_create("ddp-status-page")
        except (OSError, AttributeError):
            return {}
        try:
            os.ftruncate(fd, VALUES_END)  # what nobody writes takes no memory
            os.pwrite(fd, page.header(self._wishes, repeat), 0)
            memory = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
        except OSError:
            os.close(fd)
            return {}
        self._sheets[local_rank] = _Sheet(rank, fd, memory)
        return {STATUS_PAGE: f"/proc/{os.getpid()}/fd/{fd}"}

    def started(self, local_rank: int, pid: int) -> None:
        if local_rank in self._sheets:
            self._sheets[local_rank].pid = pid

    def renumber(self, local_rank: int, rank: int) -> None:
        """The rank keeps its process and its page, and gets another number."""
        if local_rank in self._sheets:
            self._sheets[local_rank].rank = rank

    def ended(self, local_rank: int) -> RankView | None:
        """Return the last view of an ended rank. The page is kept until the next process of this local rank starts."""
        sheet = self._sheets.get(local_rank)
        if sheet is not None:
            sheet.alive = False
        return self.view(local_rank)

    def pids(self) -> list[int]:
        """Return the processes of the ranks that have started and not ended."""
        return list(self.processes().values())

    def processes(self) -> dict[int, int]:
        """Return the same by rank."""
        return {sheet.rank: sheet.pid for sheet in self._sheets.values() if sheet.pid and sheet.alive}

    def views(self) -> tuple[RankView, ...]:
        """Read the views of all started ranks of this node, including those that have ended."""
        return tuple(self._look(sheet) for sheet in self._sheets.values())

    def view(self, local_rank: int) -> RankView | None:
        sheet = self._sheets.get(local_rank)
        return None if sheet is None else self._look(sheet)

    def progressed_with_others(self) -> bool:
        """Return whether, since the last call, these ranks have finished something that needs ranks of other nodes.

        That is a collective in a group with ranks of other nodes, or, once there is such a group, a training step. The
        collectives of torch's DDP are in C++ and only the steps show them.
        """
        before = self._done_with_others
        self._done_with_others = sum(_done_with_others(view, len(self._sheets)) for view in self.views())
        return self._done_with_others > before

    def step(self) -> int | None:
        """Return the lowest step of the ranks if every rank may be waiting for other ranks. CPU use is not considered.

        Return None if a rank does something else, or if this is unknown.
        """
        alive = [view for view in self.views() if view.process.alive]
        steps = [view.step for view in alive if view.known and view.phase in _MAY_BE_WAITING]
        return min(steps) if steps and len(steps) == len(alive) else None

    def reached(self) -> Reached | None:
        """Return the most steps that a rank has finished, also one that has ended.

        None if that does not show how far the ranks came: no page was written, or they saved something without steps.
        """
        known = [view for view in self.views() if view.known]
        numbered = [view.step for view in known if view.totals.numbers_steps]
        if numbered:
            return Reached(max(numbered), numbered=True)
        step = max((view.step for view in known), default=0)
        if not step and (not known or any(view.totals.checkpoints for view in known)):
            return None
        return Reached(step)

    def close(self, local_rank: int) -> None:
        sheet = self._sheets.pop(local_rank, None)
        if sheet is not None:
            self._unread = (self._unread + self._new_values(sheet))[-_MOST_UNREAD:]
            sheet.memory.close()
            os.close(sheet.fd)

    def close_all(self) -> None:
        for local_rank in list(self._sheets):
            self.close(local_rank)

    def values(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """What the scripts have passed to `ddp.log` since the last call, as lines, by rank.

        The first list is of processes that others have replaced since.
        """
        before, self._unread = self._unread, []
        return before, [each for sheet in self._sheets.values() for each in self._new_values(sheet)]

    def _new_values(self, sheet: _Sheet) -> list[tuple[int, bytes]]:
        def total() -> int:
            with self._lock:
                return int.from_bytes(os.pread(sheet.fd, VALUES_COUNTER, VALUES_AT), "little")

        if (end := total()) == sheet.values_read:
            return []
        ring = os.pread(sheet.fd, VALUES_ROOM, RING_AT)
        lines = ring_lines(ring, sheet.values_read, end, total())
        sheet.values_read = end
        return [(sheet.rank, line) for line in lines]

    def _look(self, sheet: _Sheet) -> RankView:
        def look(at: int, size: int) -> bytes:
            with self._lock:  # used only as a memory barrier, which keeps the loads in this order on any CPU
                return sheet.memory[at : at + size]

        sheet.seen = page.snapshot(look, sheet.seen)
        now = time.monotonic()
        sheet.process = _process(sheet, now)
        return page.view(sheet.seen, time.monotonic_ns(), sheet.rank, sheet.process)


def _done_with_others(view: RankView, here: int) -> int:
    groups = [group.finished for group in view.groups if group.size > here]
    return sum(groups) + view.step if groups else 0


def _process(sheet: _Sheet, now: float) -> ProcessView:
    if not sheet.alive:
        return ProcessView(alive=False, state="Z", cpu_s=sheet.cpu_s, cpu_moved=False)
    stat = process_stat(sheet.pid) if sheet.pid else None
    if stat is None:
        return ProcessView(alive=bool(not sheet.pid), cpu_s=sheet.cpu_s)
    state, cpu_s = stat.state, stat.cpu_s
    if state in _AT_REST and is_frozen(sheet.pid):
        state = "F"
    passed, used = now - sheet.looked_at, cpu_s - sheet.cpu_s
    moved = sheet.process.cpu_moved
    if passed >= _SHORTEST_S:
        moved = used > max(_IDLE_SHARE * passed, _IDLE_S)
        sheet.cpu_s, sheet.looked_at = cpu_s, now
    return ProcessView(True, state, cpu_s, moved, _wchan(sheet.pid))


def _wchan(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        name = file.read().strip()
        return "" if name == "0" else name
    return ""


# --- frozen processes ------------------------------------------------------------------------------
#
# Whether a cgroup freezer (`docker pause`) has frozen a process. The process state does not show it.

_SIGNS = (("cgroup.events", "frozen 1"), ("freezer.state", "FROZEN"))  # versions 2 and 1


def is_frozen(pid: int) -> bool:
    return any(map(_is_frozen, folders(pid, "freezer")))


def _is_frozen(folder: str) -> bool:
    """The root cgroup has neither cgroup.events nor freezer.state, because it cannot be frozen."""
    for name, sign in _SIGNS:
        with suppress(OSError, UnicodeDecodeError):
            if sign in Path(os.path.join(folder, name)).read_text().splitlines():
                return True
    return False
