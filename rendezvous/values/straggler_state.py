"""The values of straggler detection: phase times of ranks, and which ranks are slower than their peers.

`diagnosing/stragglers` compares them.
"""

from __future__ import annotations

from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.late_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The steps and phase times of a rank, both since its start."""

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
    """The seconds per step of a slow rank and of its peers, in one window."""

    phase: str
    own_s: float
    peers_s: float


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The state of a rank that was slow recently."""

    node: str
    slow: int  # windows in a row in which it was slow ...
    fast: int  # ... or, after those, in which it was not
    named: bool
    slowness: Slowness


@dataclass(frozen=True, slots=True)
class StragglerState:
    """The straggler state of one generation."""

    reports: FrozenMap[str, tuple[PhaseTimes, ...]] = EMPTY  # in this window, by node
    base: FrozenMap[str, tuple[PhaseTimes, ...]] = EMPTY  # reports at the beginning of the window
    slow_ranks: FrozenMap[int, SlowRank] = EMPTY  # by rank

    @property
    def named(self) -> list[tuple[int, SlowRank]]:
        return [(rank, slow) for rank, slow in self.slow_ranks.items() if slow.named]
