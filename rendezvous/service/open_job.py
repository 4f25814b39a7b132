"""What an open job offers to tools, in the service and in an agent's process: its state, orders, and its journal.

Without gRPC: a job on one machine has these too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.rounds.journal import Line, Note, lines
from rendezvous.values.questions import REMARKS, RestartTimes
from rendezvous.values.state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.service.owner import JobOwner
    from rendezvous.values.events import Event
    from rendezvous.values.questions import Remark
    from rendezvous.values.state import JobState

_log = logging.getLogger("rendezvous")
_NOTES_KEPT = 1000
_WATCHER_NOTES = 1000
_RESTART_TIMES_KEPT = 4096
_CROWD = 64  # with more members than this, log one join in 64: a log line costs as much as a join


class Watcher:
    """A client that follows the journal; the service ends its stream if it falls too far behind."""

    def __init__(self, notes: list[Note]) -> None:
        self.queue: asyncio.Queue[Note | None] = asyncio.Queue(len(notes) + _WATCHER_NOTES)
        for note in notes:
            self.queue.put_nowait(note)
        self.fell_behind = False
        self.job_moved = False  # to another replica, which reports what follows

    def put(self, note: Note | None) -> None:
        try:
            self.queue.put_nowait(note)
        except asyncio.QueueFull:
            self.fell_behind = True


class OpenJob:
    """`owner` is set by the subclass. `count` is called with the kind of each entry of the journal."""

    owner: JobOwner

    def __init__(self, job_id: str, count: Callable[[str], None]) -> None:
        self.job_id = job_id
        self.restart_times: dict[tuple[int, str], RestartTimes] = {}  # by generation and node
        self.watchers: set[Watcher] = set()
        self.notes: deque[Note] = deque(maxlen=_NOTES_KEPT)
        self.journal_id = os.urandom(16).hex()  # sequence numbers are valid within one journal
        self._count = count
        self._orders: dict[int, tuple[Event, asyncio.Future[None]]] = {}
        self._seq = 0

    @property
    def state(self) -> JobState:
        return self.owner.state

    def owner_task(self) -> asyncio.Task[None] | None:
        """The task in which the owner runs."""
        raise NotImplementedError

    async def execute(self, order: Event) -> JobState:
        """Post an order and return the state after it was processed, whether or not it changed anything."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders[id(order)] = (order, done)
        task = self.owner_task()
        ended: set[asyncio.Future[None]] = {done} if task is None else {done, task}
        try:
            self.owner.post(order)
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._orders[id(order)]
        if not done.done():
            raise ConnectionError(
                "this replica stopped serving the job before it processed the order; send the order again"
            )
        return self.state

    # --- notes -------------------------------------------------------------------------------------

    def note(self, event: Event | None, before: JobState, after: JobState) -> None:
        """After each event: the journal, and the order that the event was."""
        if self._orders and (order := self._orders.get(id(event))) is not None and not order[1].done():
            order[1].set_result(None)
        if after is before:
            return
        for line in lines(event, before, after):
            self._add(line, after.generation, _level(line, after))
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            for watcher in self.watchers:
                watcher.put(None)

    def _add(self, line: Line, generation: int, level: int) -> None:
        self._seq += 1
        note = Note(self._seq, time.time(), generation, line.kind, line.node, line.text)
        self.notes.append(note)
        self._count(line.kind)
        extra = {"job": self.job_id, "generation": generation, "kind": line.kind}
        _log.log(level, line.text, extra=extra)
        for watcher in self.watchers:
            watcher.put(note)

    def remark(self, remark: Remark | RestartTimes, node: str = "") -> None:
        """Note what an agent or an operator says, without a change of the state."""
        if isinstance(remark, RestartTimes):
            self.restart_times[remark.generation, node] = replace(remark, node=node)
            while len(self.restart_times) > _RESTART_TIMES_KEPT:
                del self.restart_times[min(self.restart_times)]
            return
        kind = remark.kind if remark.kind in REMARKS else REMARKS[0]
        text = "".join(char if char.isprintable() else " " for char in remark.text)
        self._add(Line(kind, text, node), remark.generation, logging.INFO)

    def watch(self, after_seq: int) -> Watcher:
        watcher = Watcher([note for note in self.notes if note.seq > after_seq])
        self.watchers.add(watcher)
        if self.state.outcome is not None:
            watcher.put(None)
        return watcher


def _level(line: Line, after: JobState) -> int:
    """The log level of an event: DEBUG for most joins of a large job. The journal contains all of them."""
    here = len(after.members)
    return logging.DEBUG if line.kind == "joined" and here > _CROWD and here % _CROWD else logging.INFO
