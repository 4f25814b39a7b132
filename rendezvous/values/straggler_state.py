"""What ranks spend their time on, and which of them are slower than their peers: the values.

`diagnosing/stragglers` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rendezvous.values.frozen_map import EMPTY, FrozenMap


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How far a rank has come and what it has spent its time on, both since it began."""

    rank: int
    steps: int
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    idle_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def own_s(self) -> float:
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.idle_s


@dataclass(frozen=True, slots=True)
class Slowness:
    """In one window: seconds per step, its own and its peers'."""

    phase: str
    own_s: float
    peers_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """A rank that was slow lately."""

    node: str
    slow: int  # windows running in which it was slow ...
    fast: int  # ... or, after those, in which it was not
    named: bool
    slowness: Slowness


@dataclass(frozen=True, slots=True)
class StragglerState:
    """All that is remembered of one generation."""

    told: FrozenMap[str, tuple[PhaseTimes, ...]] = EMPTY  # in this window, by node
    base: FrozenMap[str, tuple[PhaseTimes, ...]] = EMPTY  # what they had told when the window began
    standings: FrozenMap[int, Standing] = EMPTY

    @property
    def named(self) -> list[tuple[int, Standing]]:
        return [(rank, standing) for rank, standing in self.standings.items() if standing.named]
