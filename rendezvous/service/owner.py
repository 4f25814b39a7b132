"""Own one job: the one place where its events become state, writes and messages.

`OwnedJob` is the logic, without I/O: an event becomes a `Turn`, and a turn takes effect only once it is committed.
`JobOwner` is the shell around it: one queue, one consumer. If a turn changes what must survive, it is written to the
store before any of its messages is sent. A failed compare-and-swap means that another process wrote the job. Then the
owner discards the turn with its messages, reads the job again, sends every agent its place in the state it has read,
and processes the event again. That is safe because every event carries its own fence.

Heartbeats arrive by the thousand each second, and matter only when a lease may have expired. They are kept aside with
their times until the next deadline, and then applied all at once. A process that was delayed (suspended, busy with
thousands of joins, or blocked by its store) may not have read all of them. It therefore postpones a late deadline
once, so that it does not mistake its own delay for silence of the agents.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.machine import step
from rendezvous.rounds.admission import renew_leases
from rendezvous.rounds.resume import resume
from rendezvous.store.protocol import Conflict
from rendezvous.values.events import AgentHeard, DeadlineReached, Persist, SetDeadline, Tell
from rendezvous.values.state import JobState, member_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rendezvous.store.protocol import JobStore
    from rendezvous.values.events import Effect, Event, ToAgent
    from rendezvous.values.types import AgentId

_DELAYED_S = 0.1  # a deadline that fires this late shows that the process was delayed ...
_CATCH_UP_S = 2.0  # ... and is postponed by the same time, up to this, to read the messages that wait


@dataclass(frozen=True, slots=True)
class Turn:
    """The state after one event, and the effects to perform once it is committed."""

    state: JobState
    effects: tuple[Effect, ...]

    @property
    def persists(self) -> bool:
        return bool(self.effects) and isinstance(self.effects[0], Persist)


class OwnedJob:
    def __init__(self) -> None:
        self.state = JobState()
        self.version = 0

    def take(self, event: Event, now: float) -> Turn:
        return Turn(*step(self.state, event, now))

    def renew_leases(self, heard: Mapping[AgentId, float]) -> None:
        """Apply heartbeats. They are not stored: leases start again when a state is read."""
        self.state = renew_leases(self.state, heard)

    def commit(self, turn: Turn, version: int) -> None:
        self.state, self.version = turn.state, version

    def reload(self, state: JobState, version: int, now: float) -> Turn:
        """Start, or start again, from the stored state."""
        turn = Turn(*resume(state, now))
        self.commit(turn, version)
        return turn


class JobOwner:
    """Processes the events of one job. `tell` must not block, and ignores agents that are not connected here.

    `vouch` returns the agents that count as alive at each deadline. `note` is called after each event, with the
    states before and after it; the event is None after the job was read from the store.
    """

    def __init__(
        self,
        store: JobStore,
        tell: Callable[[AgentId, ToAgent], None],
        vouch: Callable[[], Iterable[AgentId]] = tuple,
        note: Callable[[Event | None, JobState, JobState], None] | None = None,
    ) -> None:
        self._job = OwnedJob()
        self._store = store
        self._tell = tell
        self._vouch = vouch
        self._note = note
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._heard: dict[AgentId, float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._fired_at = 0.0
        self._catching_up = False

    @property
    def state(self) -> JobState:
        return self._job.state

    @property
    def backlog(self) -> int:
        """The number of queued events."""
        return self._events.qsize()

    def post(self, event: Event) -> None:
        """Queue an event. Never blocks: the streams bound how many messages a client may have in flight."""
        self._events.put_nowait(event)

    def note_contact(self, agent: AgentId) -> None:
        """Record a heartbeat. If the agent is not a member or the job is over, answer it at once."""
        state = self._job.state
        if state.outcome is None and member_of(state, agent) is not None:
            self._heard[agent] = asyncio.get_running_loop().time()
        else:
            self.post(AgentHeard(agent))

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
            if isinstance(event, DeadlineReached) and self._heard:
                self._job.renew_leases(self._heard)
                self._heard.clear()
            turn = self._job.take(event, asyncio.get_running_loop().time())
            version = self._job.version
            if turn.persists:
                try:
                    version = await self._store.save(turn.state, version)
                except Conflict:
                    await self._reload()
                    continue
            before = self._job.state
            self._job.commit(turn, version)
            if self._note is not None:
                self._note(event, before, turn.state)
            self._perform(turn)
            return

    async def _reload(self) -> None:
        """Read the job and write it back unchanged: after that, a write of an earlier owner conflicts.

        Otherwise an owner that was just deposed could still seal a world that this one does not know.
        """
        while True:
            state, version = await self._store.load()
            try:
                version = await self._store.save(state, version)
            except Conflict:
                continue
            break
        before = self._job.state
        turn = self._job.reload(state, version, asyncio.get_running_loop().time())
        if self._note is not None:
            self._note(None, before, turn.state)
        self._perform(turn)

    def _perform(self, turn: Turn) -> None:
        for effect in turn.effects:
            match effect:
                case Persist():
                    pass  # already written
                case Tell(agent, message):
                    self._tell(agent, message)
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
        for agent in self._vouch():
            self.post(AgentHeard(agent))
        self._fired_at = asyncio.get_running_loop().time()
        self.post(DeadlineReached())

    def _postpone(self, deadline: float) -> bool:
        """Postpone a deadline that fired late, once, so that messages which wait are read first."""
        now = asyncio.get_running_loop().time()
        if now - deadline <= _DELAYED_S or self._catching_up:
            return False
        self._catching_up = True
        again = now + min(now - deadline, _CATCH_UP_S)
        self._wake_at(again)
        return True
