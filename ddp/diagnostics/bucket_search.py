"""Which bucket sizes are worth a trial, and which is kept: what was measured in the first steps -> plans.

The model is simple, and is only asked which plans to try. Gradients arrive at known times; a bucket is ready with its
last one; collectives run one after the other, each for as long as the cost curve says. What is still under way when
the backward has computed its last gradient is exposed, and is to be small. Every bucket also costs the computing
thread a little. Where ranks share processors, a prediction like this is a hope: so what it likes best is tried beside
the default, in turns, and kept only if the slowest rank is faster with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddp.reducer.plan import MIB, Limits, rebuilt_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.plan import BucketPlan, ParameterFacts, Transport

# What a bucket costs the thread that computes gradients: hooks and the call that launches.
BUCKET_OVERHEAD_S = 40e-6
CAPS_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 400)
_FIRST_BYTES = MIB
# A trial: so many candidates beside the default, so many turns each, of so many steps; the first ones of a turn find
# new buckets without memory, and do not count.
CANDIDATES = 2
TURNS = 3
STEPS = 6
UNCOUNTED = 2
# A candidate has to be faster by this much, or the difference is taken for noise.
MARGIN = 0.03


@dataclass(frozen=True)
class Curve:
    """How long an all-reduce of so many bytes takes: measured points, straight lines between and beyond them."""

    points: tuple[tuple[int, float], ...]

    def seconds(self, nbytes: int) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        pairs = list(zip(self.points, self.points[1:], strict=False))
        (x0, y0), (x1, y1) = next((pair for pair in pairs if nbytes <= pair[1][0]), pairs[-1])
        return max(min(y0, y1), y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)) if nbytes > x0 else y0


def sizes_to_measure(total_bytes: int) -> list[int]:
    """From 16 KiB on, no larger than the whole model nor than 64 MiB."""
    most = min(max(total_bytes, 1 << 16), 64 * MIB)
    sizes = [1 << exponent for exponent in range(14, 27, 2) if 1 << exponent < most]
    return [*sizes, most]


@dataclass(frozen=True)
class Arrivals:
    """When the gradient of each parameter was there, and when the last one had been computed, after the start of the
    backward, in seconds."""

    at: tuple[float, ...]
    computed: float


def arrivals(steps: Sequence[Sequence[float]], computed: Sequence[float]) -> Arrivals:
    """Medians of several steps; each names every parameter's time."""
    return Arrivals(tuple(median(times) for times in zip(*steps, strict=True)), median(computed))


def exposed(plan: BucketPlan, facts: Sequence[ParameterFacts], seen: Arrivals, curve: Curve) -> float:
    """For how long communication is predicted to outlast the computing, in seconds."""
    free = 0.0
    for bucket in plan.buckets:
        ready = max(seen.at[i] for i in bucket.members)
        free = max(free, ready) + curve.seconds(sum(facts[i].nbytes for i in bucket.members))
    return max(0.0, free - seen.computed) + len(plan.buckets) * BUCKET_OVERHEAD_S


def candidates(
    facts: Sequence[ParameterFacts],
    order: Sequence[int],
    default: Limits,
    transport: Transport,
    seen: Arrivals,
    curve: Curve,
) -> list[Limits]:
    """The most promising ones, best first, that make another plan than the default does."""
    known: list[BucketPlan] = [rebuilt_plan(facts, order, default, transport)]
    rated: list[tuple[float, int, Limits]] = []
    for limit in _limits(default):
        plan = rebuilt_plan(facts, order, limit, transport)
        if plan not in known:
            known.append(plan)
            rated.append((exposed(plan, facts, seen, curve), len(rated), limit))
    return [limit for _, _, limit in sorted(rated, key=lambda one: one[:2])[:CANDIDATES]]


def _limits(default: Limits) -> list[Limits]:
    sizes = [cap * MIB for cap in CAPS_MIB]
    return [Limits(default.first, (first, cap)) for cap in sizes for first in (min(_FIRST_BYTES, cap), cap)]


# --- a trial -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Plans in turns: 0 is the default. Every rank counts the same steps, hence is in the same place."""

    plans: int
    step: int = 0

    @property
    def plan(self) -> int:
        return self.step // STEPS % self.plans

    @property
    def counts(self) -> bool:
        """Whether the step that comes is one of those that are timed."""
        return self.step % STEPS >= UNCOUNTED

    @property
    def over(self) -> bool:
        return self.step >= self.plans * TURNS * STEPS

    @property
    def changes(self) -> bool:
        """Whether the step that comes is the first of a turn."""
        return self.step % STEPS == 0

    def stepped(self) -> Trial:
        return Trial(self.plans, self.step + 1)


def chosen(times: Sequence[Sequence[int]]) -> int:
    """`times`: of each rank, what a step took with each plan. -> the plan to keep; 0 is the default.

    The ranks wait for each other: the slowest one says how long a step takes.
    """
    slowest = [max(of_rank[plan] for of_rank in times) for plan in range(len(times[0]))]
    best = min(range(len(slowest)), key=lambda plan: (slowest[plan], plan))
    return best if slowest[best] < slowest[0] * (1 - MARGIN) else 0
