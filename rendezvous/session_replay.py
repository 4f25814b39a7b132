"""One agent's conversation with the service, as far as it outlives a single stream. Pure.

What an agent said of its current generation is not durable at the service, so a new stream begins with
saying it again: the join word for word, then the reports. Once a newer generation is heard of, the reports of
the older one are nobody's concern any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rendezvous.values.events import (
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    FromAgent,
    NodeHealth,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)

if TYPE_CHECKING:
    from rendezvous.values.events import ToAgent
    from rendezvous.values.types import Assignment


@dataclass(frozen=True, slots=True)
class Redirect:
    """The service ends the stream: go to `address` (empty: any that is known) after `after_s`."""

    address: str
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Recital:
    """What an agent would say on a new stream."""

    joined: AgentJoined | None = None
    generation: int = 0
    running: Assignment | None = None  # its ranks were not stopped
    reports: tuple[FromAgent, ...] = ()
    health: NodeHealth | None = None  # the last word on it
    left: AgentLeft | None = None

    def said(self, message: FromAgent) -> Recital:
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
                kept = self._of(message.generation)
                running = None if isinstance(message, AgentStopped) else kept.running
                return replace(kept, reports=(*kept.reports, message), running=running)
            case _:
                return self  # a heartbeat, and a checkpoint whose moment passes

    def heard(self, message: ToAgent) -> Recital:
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

    def _of(self, generation: int) -> Recital:
        if generation <= self.generation:
            return self
        return replace(self, generation=generation, running=None, reports=())

    def lines(self) -> tuple[FromAgent, ...]:
        """Nothing before the join: a stream that does not begin with one is refused."""
        if self.joined is None:
            return ()
        joined = replace(self.joined, generation=self.generation, running=self.running)
        health = (self.health,) if self.health is not None else ()
        return (joined, *self.reports, *health, *((self.left,) if self.left is not None else ()))

    def asked_for_by(self, message: ToAgent) -> tuple[FromAgent, ...]:
        """A service that tells again where this agent stands may have missed what it had reported."""
        match message:
            case Assigned(assignment) if assignment.generation == self.generation:
                return self.reports
            case StoreAt(generation) if generation == self.generation:
                return self.reports
            case _:
                return ()
