"""What the time of ranks was spent on: each second belongs to exactly one field of `TimeSpent`.

The time of a rank begins when its agent starts, and ends when the agent ends. docs/goodput.md defines the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from rendezvous.values.durations import duration_text
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import NO_REPEAT, Repeat

# --- times -----------------------------------------------------------------------------------------

TRAINING = ("forward", "backward", "communication", "optimizer")
LOST = ("detect", "stop", "meet", "fork", "init", "redo")


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds."""

    start: float = 0.0  # until the first part of a step, at the first start of the rank
    data: float = 0.0  # it waits for its data loader
    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0  # not hidden behind the backward pass
    optimizer: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    waiting: float = 0.0  # for slower ranks, or after its own end
    detect: float = 0.0  # without progress, until the order to stop
    stop: float = 0.0  # until all its processes have ended
    meet: float = 0.0  # until the next world is formed
    fork: float = 0.0  # until its new process runs
    init: float = 0.0  # until the first part of a step
    redo: float = 0.0  # steps that had been finished before, and were lost
    idle: float = 0.0  # everything else: code of the script between these

    @property
    def total(self) -> float:
        return self._of(CLASSES)

    @property
    def training(self) -> float:
        return self._of(TRAINING)

    @property
    def lost(self) -> float:
        return self._of(LOST)

    @property
    def goodput(self) -> float:
        """The share of the time in steps that count."""
        return self.training / self.total if self.total > 0 else 0.0

    def _of(self, names: tuple[str, ...]) -> float:
        return float(sum(getattr(self, name) for name in names))

    def plus(self, name: str, seconds: float) -> TimeSpent:
        changed = {each: getattr(self, each) for each in CLASSES}
        changed[name] += seconds
        return TimeSpent(**changed)

    def __add__(self, other: TimeSpent) -> TimeSpent:
        return TimeSpent(*(getattr(self, name) + getattr(other, name) for name in CLASSES))


CLASSES = tuple(field.name for field in fields(TimeSpent))


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time of one rank, and how far it is in this generation."""

    rank: int
    spent: TimeSpent
    steps: int = 0  # finished; as the script numbers them, if it does
    saved_steps: int = 0  # of these, at the end of the last checkpoint; 0: it has taken none
    numbers_steps: bool = False  # the script sets the number of its steps
    has_page: bool = False  # the rank shows what it does; if not, its time since the start counts as idle
    # Seconds in which collectives ran behind its computation. They belong to the classes of `spent` as well.
    hidden: float = 0.0


@dataclass(frozen=True, slots=True)
class JobTime:
    """The time of all ranks together."""

    ranks: int
    spent: TimeSpent
    hidden: float = 0.0  # as in RankTime


def sum_of(spent: Iterable[TimeSpent]) -> TimeSpent:
    whole = TimeSpent()
    for one in spent:
        whole += one
    return whole


# --- what the service keeps ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The last report of a node."""

    incarnation: str
    ranks: tuple[RankTime, ...]
    waited: tuple[float, ...] = ()  # of the time in collectives, by the order of `ranks`
    share: float | None = None  # in collectives: of the rank with the smallest, since the report before

    def divided(self) -> tuple[RankTime, ...]:
        return tuple(
            replace(rank, spent=rank.spent.plus("communication", -waited).plus("waiting", waited))
            for rank, waited in zip(self.ranks, self.waited, strict=True)
        )


@dataclass(frozen=True, slots=True)
class TimeState:
    nodes: FrozenMap[str, NodeTime] = EMPTY
    gone: JobTime = JobTime(0, TimeSpent())  # agents that another agent of their node has replaced
    repeat: Repeat = NO_REPEAT  # what the ranks of this generation do again


# --- as text ----------------------------------------------------------------------------------------------


def in_words(time: JobTime) -> str:
    """For example "goodput 81.2 % of 4 ranks x 12 min: forward 30.0 %, ...", the largest first."""
    whole = time.spent.total
    if whole <= 0 or not time.ranks:
        return ""
    shares = {name: getattr(time.spent, name) for name in CLASSES if name not in LOST}
    shares["lost to stops and restarts"] = time.spent.lost
    words = _parts(shares, whole)
    if inside := _parts({name: getattr(time.spent, name) for name in LOST}, whole):
        lost = f"lost to stops and restarts {_share(time.spent.lost, whole)}"
        words = words.replace(lost, f"{lost} ({inside})")
    ranks = f"{time.ranks} rank{'s' if time.ranks > 1 else ''}"
    each = duration_text(whole / time.ranks)
    return f"goodput {_share(time.spent.training, whole)} of {ranks} x {each}: {words}"


def _parts(shares: Mapping[str, float], whole: float) -> str:
    ordered = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {_share(each, whole)}" for name, each in ordered if each >= whole * 0.0005)


def _share(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f} %"


# --- stragglers ------------------------------------------------------------------------------------
#
# The values of straggler detection: phase times of ranks, and which ranks are slower than their peers.
#
# `diagnosing/stragglers` compares them.


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
