"""Owning one job: the one place where its events become state, writes and messages.

`OwnedJob` is the logic, without I/O: an event becomes a `Turn`, and the turn counts only once it is
committed. `JobOwner` is the shell around it: one queue, one consumer; each turn is written (when it must
be) before any of its messages goes out. A lost compare-and-swap means that somebody else wrote: the turn
is thrown away with its messages, the job is read anew, everyone is told where they stand in what was read,
and the event is looked at again, which is safe because every event carries its own fence.

Signs of life come by the thousand each second, and matter only when somebody's lease might have run out. They
are kept aside with their instants until a deadline is due, and then taken all at once. A process that was held
up (frozen for a while, with thousands of joins to read, or by a store that could not be written) has not taken them
all: it looks at a deadline again once it had time for that, before it takes its own silence for that of the agents.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.machine import step
from rendezvous.rounds.admission import all_heard
from rendezvous.rounds.resume import resume
from rendezvous.store.protocol import Conflict
from rendezvous.values.events import AgentHeard, DeadlineReached, Persist, SetDeadline, Tell
from rendezvous.values.state import JobState, member_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rendezvous.store.protocol import JobStore
    from rendezvous.values.events import Effect, Event, ToAgent
    from rendezvous.values.types import AgentId

_HELD_UP_S = 0.1  # a deadline that is noticed this late says that the process was held up ...
_CATCH_UP_S = 2.0  # ... and gets as long again, up to this, to read what came meanwhile


@dataclass(frozen=True, slots=True)
class Turn:
    """What one event would change, and what is to be said once that is so."""

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

    def hear(self, heard: Mapping[AgentId, float]) -> None:
        """Nothing of it is written: leases begin anew where a state is read."""
        self.state = all_heard(self.state, heard)

    def commit(self, turn: Turn, version: int) -> None:
        self.state, self.version = turn.state, version

    def reload(self, state: JobState, version: int, now: float) -> Turn:
        """Start, or start over, from what the store holds."""
        turn = Turn(*resume(state, now))
        self.commit(turn, version)
        return turn


class JobOwner:
    """`tell` must not block, and ignores agents that are not connected here.

    `vouch` names agents that count as heard whenever a deadline is due. `note` hears of every event once it is
    done with (None: the job was read anew), with the states before and after it.
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
        self._rang_at = 0.0
        self._catching_up = False

    @property
    def state(self) -> JobState:
        return self._job.state

    @property
    def backlog(self) -> int:
        """Events that wait their turn."""
        return self._events.qsize()

    def post(self, event: Event) -> None:
        """Never blocks; how much a client may have under way is bounded where its messages come in."""
        self._events.put_nowait(event)

    def heard(self, agent: AgentId) -> None:
        """Who is no member, or is one of a job that is over, has an answer to hear, at once."""
        state = self._job.state
        if state.outcome is None and member_of(state, agent) is not None:
            self._heard[agent] = asyncio.get_running_loop().time()
        else:
            self.post(AgentHeard(agent))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._reload()
            while True:
                event = await self._events.get()
                if not (isinstance(event, DeadlineReached) and self._catches_up(self._rang_at)):
                    await self._take(event)
        finally:
            self._set_deadline(None)

    async def _take(self, event: Event) -> None:
        while True:
            if isinstance(event, DeadlineReached) and self._heard:
                self._job.hear(self._heard)
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
        """Read, and write the same again: from here on no write of an earlier owner can land.

        Without it an owner deposed a moment ago could still seal a world that this one knows nothing of.
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
                    pass  # done, or there would be nothing to perform
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
            self._alarm = asyncio.get_running_loop().call_at(at, self._ring, at)

    def _ring(self, due: float) -> None:
        if self._catches_up(due):
            return
        for agent in self._vouch():
            self.post(AgentHeard(agent))
        self._rang_at = asyncio.get_running_loop().time()
        self.post(DeadlineReached())

    def _catches_up(self, due: float) -> bool:
        """A deadline that is looked at late waits once more: what was said meanwhile comes first."""
        now = asyncio.get_running_loop().time()
        if now - due <= _HELD_UP_S or self._catching_up:
            return False
        self._catching_up = True
        again = now + min(now - due, _CATCH_UP_S)
        self._wake_at(again)
        return True
