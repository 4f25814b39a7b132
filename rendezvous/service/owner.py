"""Own one job: the one place where its events become state, writes and messages.

`OwnedJob` is the logic, without I/O: an event becomes a `Transition`, which takes effect only once it is committed.
`JobOwner` adds the I/O: one queue, one consumer. If a transition changes durable state, it is written to the store
before any of its messages is sent. A failed compare-and-swap means that another process has written the job. Then the
owner does four things:

1. It discards the transition with its messages.
2. It reads the job again.
3. It sends every agent the messages that the state requires.
4. It processes the event again. This is safe, because an event contains its generation: an outdated event is ignored.

Thousands of heartbeats can arrive per second, and they are needed only when a lease may have expired. They are kept
with their times until the next deadline, and then applied all at once. Ranks that finish a collective with other nodes
show that all these nodes are alive, so one heartbeat with progress counts for all of them.

A process that was delayed (suspended, busy with thousands of joins, or blocked by its store) may not have read all of
them. So it postpones a late deadline once. Then no agent counts as lost because of a delay in the service.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from rendezvous.machine import step
from rendezvous.rounds.admission import (
    Cadence,
    after_progress,
    is_in_world,
    is_lost_early,
    renew_leases,
    resume,
    trains,
)
from rendezvous.rounds.event_log import EventLine, LoggedEvent, Past, Series, lines, point_of
from rendezvous.store.protocol import Conflict, JobStore
from rendezvous.values.events import (
    AgentHeard,
    DeadlineReached,
    Effect,
    Event,
    Persist,
    RankTimesReported,
    SetDeadline,
    Tell,
    ToAgent,
)
from rendezvous.values.job_state import JobState, Phase, member_of
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import REMARKS, Remark, RestartTimes
from rendezvous.values.types import AgentId

# Longer than a network outage of 2 s plus the recovery of TCP, if there is a heartbeat a second.
_SILENT_S = 4.0
DELAYED_S = 0.1  # a deadline that fires this late shows that the process was delayed ...
CATCH_UP_S = 2.0  # ... and is postponed by the same time, up to this, to read the messages that wait


class OwnedByOther(Exception):
    """Another replica owns the job. `address` is empty while the owner is not known."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"another replica owns this job: {address or 'its address is not known yet; try again in a few seconds'}"
        )
        self.address = address


@dataclass(frozen=True, slots=True)
class Transition:
    """The state after one event, and the effects to perform once it is committed.

    `event` is None if the state was read from the store.
    """

    state: JobState
    effects: tuple[Effect, ...]
    event: Event | None = None
    now: float = 0.0

    @property
    def persists(self) -> bool:
        return bool(self.effects) and isinstance(self.effects[0], Persist)


class Record(Protocol):
    """What a job's machine was given, for `ddpctl replay`: see rendezvous/replay/journal.py."""

    def loaded(self, state: JobState, now: float, effects: tuple[Effect, ...], after: JobState) -> None: ...
    def heard(self, heartbeats: Mapping[AgentId, float]) -> None: ...
    def took(self, event: Event, now: float, effects: tuple[Effect, ...], after: JobState) -> None: ...


class OwnedJob:
    """Only what takes effect is recorded: a discarded transition is not."""

    def __init__(self, record: Record | None = None) -> None:
        self.state = JobState()
        self.version = 0
        self._record = record

    def take(self, event: Event, now: float) -> Transition:
        return Transition(*step(self.state, event, now), event, now)

    def renew_leases(self, heartbeats: Mapping[AgentId, float]) -> None:
        """Apply heartbeats. They are not stored: leases start again when a state is read."""
        self.state = renew_leases(self.state, heartbeats)
        if self._record is not None:
            self._record.heard(heartbeats)

    def commit(self, transition: Transition, version: int) -> None:
        self.state, self.version = transition.state, version
        if self._record is not None and transition.event is not None:
            self._record.took(transition.event, transition.now, transition.effects, transition.state)

    def reload(self, state: JobState, version: int, now: float) -> Transition:
        """Start, or start again, from the stored state."""
        transition = Transition(*resume(state, now))
        self.commit(transition, version)
        if self._record is not None:
            self._record.loaded(state, now, transition.effects, transition.state)
        return transition


class JobOwner:
    """Processes the events of one job. `send` must not block, and ignores agents that are not connected here.

    `always_alive` returns the agents that count as alive at each deadline. `note` is called after each event, with the
    states before and after it; the event is None after the job was read from the store. `record` gets what the machine
    is given.
    """

    def __init__(
        self,
        store: JobStore,
        send: Callable[[AgentId, ToAgent], None],
        always_alive: Callable[[], Iterable[AgentId]] = tuple,
        note: Callable[[Event | None, JobState, JobState], None] | None = None,
        record: Record | None = None,
    ) -> None:
        self._job = OwnedJob(record)
        self._store = store
        self._send = send
        self._always_alive = always_alive
        self._note = note
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._heartbeats: dict[AgentId, float] = {}
        self._heard_at = -math.inf  # the latest of an agent of the world
        self._cadence: Cadence | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._fired_at = 0.0
        self._catching_up = False
        self._saving_since = math.inf

    @property
    def state(self) -> JobState:
        return self._job.state

    @property
    def backlog(self) -> int:
        """The number of queued events."""
        return self._events.qsize()

    @property
    def store_wait_s(self) -> float:
        """How long the write of the last decision has been waiting for the store."""
        return max(0.0, asyncio.get_running_loop().time() - self._saving_since)

    def post(self, event: Event) -> None:
        """Queue an event. Never blocks: the streams bound how many messages a client may have in flight."""
        self._events.put_nowait(event)

    def note_contact(self, agent: AgentId, progress: bool = False) -> None:
        """Record a heartbeat. If the agent is not a member or the job is over, answer it at once."""
        state = self._job.state
        if state.outcome is None and member_of(state, agent) is not None:
            now = self._heartbeats[agent] = asyncio.get_running_loop().time()
            if is_in_world(state, agent):
                self._heard_at = now
            if progress and trains(state, agent):
                self._cadence = after_progress(self._cadence, state.generation, now)
        else:
            self.post(AgentHeard(agent))

    def heard(self, now: float) -> dict[str, float]:
        """When each node was heard last. The leases in the state are renewed at deadlines only."""
        found = {agent.node: at for agent, at in self._heartbeats.items()}
        return found | {agent.node: now for agent in self._always_alive()}

    async def run(self) -> None:
        """Process events until cancelled."""
        try:
            await self._reload()
            while True:
                event = await self._events.get()
                if not (isinstance(event, DeadlineReached) and self._postpone(self._fired_at)):
                    await self._take(event)
        finally:
            self._set_deadline(None)

    async def _take(self, event: Event) -> None:
        while True:
            if isinstance(event, DeadlineReached) and self._heartbeats:
                self._job.renew_leases(self._signs_of_life())
                # Of agents that are not members. The others are kept: they tell since when an agent is silent.
                state = self._job.state
                self._heartbeats = {
                    a: at for a, at in self._heartbeats.items() if member_of(state, a) is not None
                }
            transition = self._job.take(event, asyncio.get_running_loop().time())
            version = self._job.version
            if transition.persists:
                try:
                    self._saving_since = asyncio.get_running_loop().time()
                    version = await self._store.save(transition.state, version)
                except Conflict:
                    await self._reload()
                    continue
                finally:
                    self._saving_since = math.inf
            before = self._job.state
            self._job.commit(transition, version)
            if self._note is not None:
                self._note(event, before, transition.state)
            self._perform(transition)
            return

    def _signs_of_life(self) -> dict[AgentId, float]:
        cadence, world = self._cadence_now(), self._job.state.world
        if cadence is None or world is None:
            return self._heartbeats
        alive = {placement.agent: cadence.last_at for placement in world.placements}
        return alive | {agent: max(at, alive.get(agent, at)) for agent, at in self._heartbeats.items()}

    def _cadence_now(self) -> Cadence | None:
        """The cadence of the generation that runs."""
        state, cadence = self._job.state, self._cadence
        is_current = cadence is not None and cadence.generation == state.generation
        return cadence if is_current and state.phase is Phase.RUNNING else None

    def lost_early(self, broken: Mapping[AgentId, float], grace_s: float) -> Iterator[tuple[AgentId, float]]:
        """The agents that are lost before their leases expire, and since when they are silent.

        `broken` has the agents without a stream, and when it broke: this is evidence too, so `grace_s` is enough.
        """
        state, cadence, heard_at = self._job.state, self._cadence, self._heard_at
        if state.phase is Phase.RUNNING and (cadence is None or heard_at - cadence.last_at < grace_s):
            return  # ranks train, and this is seen at a glance
        silent_s = _SILENT_S + max(0.0, state.spec.heartbeat_s - 1.0) if state.spec is not None else _SILENT_S
        for agent, at in {**self._heartbeats, **broken}.items():
            least_s = grace_s if agent in broken else silent_s
            if is_lost_early(state, agent, cadence, at, heard_at, least_s):
                yield agent, at

    async def _reload(self) -> None:
        """Read the job and write it back unchanged: after that, a write of an earlier owner conflicts.

        Otherwise a former owner could still write a new world.
        """
        while True:
            state, version = await self._store.load()
            try:
                version = await self._store.save(state, version)
            except Conflict:
                continue
            break
        before = self._job.state
        transition = self._job.reload(state, version, asyncio.get_running_loop().time())
        if self._note is not None:
            self._note(None, before, transition.state)
        self._perform(transition)

    def _perform(self, transition: Transition) -> None:
        for effect in transition.effects:
            match effect:
                case Persist():
                    pass  # already written
                case Tell(agent, message):
                    self._send(agent, message)
                case SetDeadline(at):
                    self._set_deadline(at)

    def _set_deadline(self, at: float | None) -> None:
        self._catching_up = False
        self._wake_at(at)

    def _wake_at(self, at: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if at is not None:
            self._alarm = asyncio.get_running_loop().call_at(at, self._fire, at)

    def _fire(self, deadline: float) -> None:
        if self._postpone(deadline):
            return
        for agent in self._always_alive():
            self.post(AgentHeard(agent))
        self._fired_at = asyncio.get_running_loop().time()
        self.post(DeadlineReached())

    def _postpone(self, deadline: float) -> bool:
        """If a deadline fires late, postpone it once, so that waiting messages are read first."""
        now = asyncio.get_running_loop().time()
        if now - deadline <= DELAYED_S or self._catching_up:
            return False
        self._catching_up = True
        again = now + min(now - deadline, CATCH_UP_S)
        self._wake_at(again)
        return True


# --- open job ---------------------------------------------------------------------------------------
#
# What an open job offers to tools, in the service and in an agent's process: its state, orders, and its journal.
#
# Without gRPC: a job on one machine has these too.

_log = logging.getLogger("rendezvous")
_NOTES_KEPT = 1000
_WATCHER_NOTES = 1000
_RESTART_TIMES_KEPT = 4096
_NOT_KEPT_AT_MOST = 1_000_000
_POINT_EVERY_S = 5.0  # as the agents report
_POINT_SHARE = 0.005  # of the time of this process, at most: with very many ranks, points are further apart
_POINTS_UNTOLD_S = 60.0  # what a process that is killed may lose of the charts
_CROWD = 64  # with more members than this, log one join in 64: a log line costs as much as a join


class Watcher:
    """A client that follows the journal; the service ends its stream if it falls too far behind."""

    def __init__(self, notes: list[LoggedEvent]) -> None:
        self.queue: asyncio.Queue[LoggedEvent | None] = asyncio.Queue(len(notes) + _WATCHER_NOTES)
        for note in notes:
            self.queue.put_nowait(note)
        self.fell_behind = False
        self.job_moved = False  # to another replica, which reports what follows

    def put(self, note: LoggedEvent | None) -> None:
        try:
            self.queue.put_nowait(note)
        except asyncio.QueueFull:
            self.fell_behind = True


class OpenJob:
    """The subclass sets `owner`. `count` is called with the kind of each entry of the journal."""

    owner: JobOwner

    def __init__(self, job_id: str, count: Callable[[str], None]) -> None:
        self.job_id = job_id
        self.restart_times: dict[tuple[int, str], RestartTimes] = {}  # by generation and node
        self.watchers: set[Watcher] = set()
        self.notes: deque[LoggedEvent] = deque(maxlen=_NOTES_KEPT)
        self.journal_id = os.urandom(16).hex()  # sequence numbers are valid within one journal
        self.began_at = self.ended_at = 0.0  # since the epoch; 0: not known, or not yet
        self.on_news: Callable[[], None] | None = None  # is called when `past` has changed
        self.figures = Series()
        self._next_point_at = self._points_told_at = 0.0
        self._count = count
        self._orders: dict[int, tuple[Event, asyncio.Future[None]]] = {}
        self._seq = 0

    @property
    def state(self) -> JobState:
        return self.owner.state

    def heard(self, now: float) -> dict[str, float]:
        return self.owner.heard(now)

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
        is_loaded = event is None  # what it shows happened in an earlier process: when, only `past` may know
        is_another_run = before.phase is Phase.ENDED and after.phase is not Phase.ENDED  # under the same name
        if not is_loaded and (before.spec is None or is_another_run):
            self.began_at, self.ended_at, self.figures = time.time(), 0.0, Series()
        if isinstance(event, RankTimesReported) and time.monotonic() >= self._next_point_at:
            self._take_point(after)
        for line in lines(event, before, after):
            self._add(line, after.generation, _level(line, after))
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            if not is_loaded:
                self.ended_at = self.ended_at or time.time()
                self._take_point(after)
            self._tell_news()
            for watcher in self.watchers:
                watcher.put(None)

    def _take_point(self, state: JobState) -> None:
        began, point = time.thread_time(), point_of(time.time(), state)
        if point is None:
            return
        self.figures = self.figures.offered(point, is_last=state.phase is Phase.ENDED)
        now, cost_s = time.monotonic(), time.thread_time() - began
        self._next_point_at = now + max(0.9 * _POINT_EVERY_S, cost_s / _POINT_SHARE)
        if now - self._points_told_at >= _POINTS_UNTOLD_S:
            self._points_told_at = now
            self._tell_news()

    def _add(self, line: EventLine, generation: int, level: int) -> None:
        self._seq += 1
        note = LoggedEvent(self._seq, time.time(), generation, line.kind, line.node, line.text)
        self.notes.append(note)
        self._tell_news()
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
            self._tell_news()
            return
        kind = remark.kind if remark.kind in REMARKS else REMARKS[0]
        text = "".join(char if char.isprintable() else " " for char in remark.text)
        self._add(EventLine(kind, text, node), remark.generation, logging.INFO)

    def _tell_news(self) -> None:
        if self.on_news is not None:
            self.on_news()

    def past(self) -> Past:
        times = tuple(self.restart_times[key] for key in sorted(self.restart_times))
        notes, points = tuple(self.notes), self.figures.points
        return Past(self.began_at, self.ended_at, self.journal_id, notes, times, points)

    def recall(self, past: Past) -> None:
        """Before the first event: continue the journal that an earlier process has kept.

        It may have told more events than it has kept, so new ones get much higher numbers.
        """
        self.began_at, self.ended_at = past.began_at, past.ended_at
        self.journal_id = past.journal_id or self.journal_id
        self.figures = Series(past.points)
        self.notes.extend(past.notes)
        self.restart_times |= {(each.generation, each.node): each for each in past.restart_times}
        self._seq = max((note.seq for note in past.notes), default=0)
        self._seq += _NOT_KEPT_AT_MOST if past.notes else 0

    def watch(self, after_seq: int) -> Watcher:
        watcher = Watcher([note for note in self.notes if note.seq > after_seq])
        self.watchers.add(watcher)
        if self.state.outcome is not None:
            watcher.put(None)
        return watcher


def _level(line: EventLine, after: JobState) -> int:
    """The log level of an event: DEBUG for most joins of a large job. The journal contains all of them."""
    here = len(after.members)
    return logging.DEBUG if line.kind == "joined" and here > _CROWD and here % _CROWD else logging.INFO
