"""Session replay: the messages that an agent sends again at the start of each stream. Pure.

The service does not store the reports of the current generation, so each new stream begins with a replay: the join,
unchanged, and then the reports. When a newer generation begins, the reports of the older generation are dropped.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.values.events import (
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    FromAgent,
    HealReady,
    NodeHealth,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    ToAgent,
    Waiting,
)
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.text_limits import ShortenedSentence
from rendezvous.values.types import Assignment


@dataclass(frozen=True, slots=True)
class Redirect:
    """The service ends the stream: connect to `address` (empty: to any known endpoint) after `after_s`."""

    address: str
    after_s: float
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class SessionReplay:
    """The messages that an agent sends at the start of a new stream."""

    joined: AgentJoined | None = None
    generation: int = 0
    running: Assignment | None = None  # its ranks were not stopped
    reports: tuple[FromAgent, ...] = ()
    health: NodeHealth | None = None  # the latest one
    left: AgentLeft | None = None

    def sent(self, message: FromAgent) -> SessionReplay:
        match message:
            case AgentJoined():
                return replace(self, joined=message)
            case AgentLeft():
                return replace(self, left=message)
            case NodeHealth():
                return replace(self, health=message)
            case StoreOpened() | RankFailed() | RanksFinished() | AgentStopped():
                if message.generation < self.generation:
                    return self
                kept = self._of(message.generation)._without_older(message)
                running = None if isinstance(message, AgentStopped) else kept.running
                return replace(kept, reports=(*kept.reports, message), running=running)
            case HealReady() if self.wants(message):
                others = (each for each in self.reports if not isinstance(each, HealReady))
                return replace(self, reports=(*others, message))
            case _:
                return self  # heartbeats and checkpoints are not replayed

    def _without_older(self, message: FromAgent) -> SessionReplay:
        """The last answer to a stop replaces earlier ones, which may name paused ranks that have ended."""
        if not isinstance(message, AgentStopped):
            return self
        return replace(self, reports=tuple(r for r in self.reports if not isinstance(r, AgentStopped)))

    def wants(self, message: FromAgent) -> bool:
        """Whether the service reads this message. A service of the release before rejects one that it does not know."""
        if not isinstance(message, HealReady):
            return True
        mine = self.running
        return mine is not None and mine.can_heal and mine.generation == message.generation

    def received(self, message: ToAgent) -> SessionReplay:
        match message:
            case Assigned(assignment) if assignment.generation > self.generation:
                return replace(self._of(assignment.generation), running=assignment)
            case Stop(generation) if generation >= self.generation:
                return replace(self._of(generation), running=None)
            case Waiting():
                return replace(self, running=None)
            case Refused(retryable=True):
                return replace(self, reports=(), running=None)
            case _:
                return self

    def _of(self, generation: int) -> SessionReplay:
        if generation <= self.generation:
            return self
        return replace(self, generation=generation, running=None, reports=())

    def messages(self) -> tuple[FromAgent, ...]:
        """The messages of the replay, the join first. Empty before the join, since a stream must begin with it."""
        if self.joined is None:
            return ()
        joined = replace(self.joined, generation=self.generation, running=self.running)
        health = (self.health,) if self.health is not None else ()
        return (joined, *self.reports, *health, *((self.left,) if self.left is not None else ()))

    def reports_for(self, message: ToAgent) -> tuple[FromAgent, ...]:
        """The reports to send again. If the service repeats a message of this generation, it may have lost them."""
        match message:
            case Assigned(assignment) if assignment.generation == self.generation:
                return self.reports
            case StoreAt(generation) if generation == self.generation:
                return self.reports
            case _:
                return ()
