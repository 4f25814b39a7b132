"""One agent's conversation with the service, as far as it outlives a single stream. Pure.

What an agent said of its current generation is not durable at the service, so a new stream begins with
saying it again: the join word for word, then the reports. Once a newer generation is heard of, the reports of
the older one are nobody's concern any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rendezvous.events import (
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    FromAgent,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreOpened,
)

if TYPE_CHECKING:
    from rendezvous.events import ToAgent


@dataclass(frozen=True, slots=True)
class Moved:
    """The service ends the stream: go to `address` (empty: any that is known) after `after_s`."""

    address: str
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Recital:
    """What an agent would say on a new stream."""

    joined: AgentJoined | None = None
    generation: int = 0
    reports: tuple[FromAgent, ...] = ()
    left: AgentLeft | None = None

    def said(self, message: FromAgent) -> Recital:
        match message:
            case AgentJoined():
                return replace(self, joined=message)
            case AgentLeft():
                return replace(self, left=message)
            case StoreOpened() | RankFailed() | RanksFinished() | AgentStopped():
                kept = self._of(message.generation)
                return replace(kept, reports=(*kept.reports, message))
            case _:
                return self  # a heartbeat, and a checkpoint whose moment passes

    def heard(self, message: ToAgent) -> Recital:
        match message:
            case Assigned(assignment):
                return self._of(assignment.generation)
            case Stop(generation):
                return self._of(generation)
            case Refused(retryable=True):
                return replace(self, reports=())
            case _:
                return self

    def _of(self, generation: int) -> Recital:
        if generation <= self.generation:
            return self
        return replace(self, generation=generation, reports=())

    def lines(self) -> tuple[FromAgent, ...]:
        """Nothing before the join: a stream that does not begin with one is refused."""
        if self.joined is None:
            return ()
        return (self.joined, *self.reports, *((self.left,) if self.left is not None else ()))
