"""Choose bucket sizes: select the plans to try from measurements, then select the plan to keep (pure functions).

A simple model selects the plans to try. Each gradient arrives at a known time. A bucket is ready when its last gradient
has arrived. Collectives run one after another, and the cost curve gives the duration of each. Communication that
continues after the last gradient has been computed is exposed; the search minimizes it. Each bucket also costs the
computing thread some time. If ranks share processors, such a prediction is unreliable. So the best candidates and the
default plan are used alternately. A candidate is kept only if it makes the slowest rank faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddp.reducer.plan import MIB, Limits, rebuilt_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.plan import BucketPlan, ParameterInfo, Transport

# The time that each bucket costs the thread that computes gradients: its hooks and its launch.
BUCKET_OVERHEAD_S = 40e-6
CAPS_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 400)
_FIRST_BYTES = MIB
# A trial: the number of candidates besides the default, of turns for each, of steps per turn, and of steps at the start
# of a turn that do not count, because new buckets have to allocate their memory first.
CANDIDATES = 2
TURNS = 3
STEPS = 6
UNCOUNTED = 2
# A candidate must be faster by this share; smaller differences count as noise.
MARGIN = 0.03


@dataclass(frozen=True)
class Curve:
    """The duration of an all-reduce as a function of its bytes: measured points, linear between and beyond them."""

    points: tuple[tuple[int, float], ...]

    def seconds(self, nbytes: int) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        pairs = list(zip(self.points, self.points[1:], strict=False))
        (x0, y0), (x1, y1) = next((pair for pair in pairs if nbytes <= pair[1][0]), pairs[-1])
        return max(min(y0, y1), y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)) if nbytes > x0 else y0


def sizes_to_measure(total_bytes: int) -> list[int]:
    """Sizes from 16 KiB up to the size of the model, at most 64 MiB."""
    largest = min(max(total_bytes, 1 << 16), 64 * MIB)
    sizes = [1 << exponent for exponent in range(14, 27, 2) if 1 << exponent < largest]
    return [*sizes, largest]


@dataclass(frozen=True)
class GradientTimes:
    """When each gradient arrived, and when all were computed, in seconds after the start of the backward."""

    at: tuple[float, ...]
    computed: float


def arrivals(steps: Sequence[Sequence[float]], computed: Sequence[float]) -> GradientTimes:
    """Medians over several steps; each step has a time for every parameter."""
    return GradientTimes(tuple(median(times) for times in zip(*steps, strict=True)), median(computed))


def exposed(plan: BucketPlan, facts: Sequence[ParameterInfo], seen: GradientTimes, curve: Curve) -> float:
    """Predict how long communication continues after the computation has ended, in seconds."""
    free = 0.0
    for bucket in plan.buckets:
        ready = max(seen.at[i] for i in bucket.members)
        free = max(free, ready) + curve.seconds(sum(facts[i].nbytes for i in bucket.members))
    return max(0.0, free - seen.computed) + len(plan.buckets) * BUCKET_OVERHEAD_S


def candidates(
    facts: Sequence[ParameterInfo],
    order: Sequence[int],
    default: Limits,
    transport: Transport,
    seen: GradientTimes,
    curve: Curve,
) -> list[Limits]:
    """Return the limits with the shortest predicted step, best first, without those that give the default plan."""
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
    """Uses several plans alternately; plan 0 is the default.

    All ranks count the same steps, so they use the same plan.
    """

    plans: int
    step: int = 0

    @property
    def plan(self) -> int:
        return self.step // STEPS % self.plans

    @property
    def counts(self) -> bool:
        """Whether the next step is timed."""
        return self.step % STEPS >= UNCOUNTED

    @property
    def over(self) -> bool:
        return self.step >= self.plans * TURNS * STEPS

    @property
    def changes(self) -> bool:
        """Whether the next step is the first one of a turn."""
        return self.step % STEPS == 0

    def next_step(self) -> Trial:
        return Trial(self.plans, self.step + 1)


def choose_plan(times: Sequence[Sequence[int]]) -> int:
    """Return the plan to keep; 0 is the default. `times`: for each rank, the duration of a step with each plan.

    Ranks wait for each other, so the slowest rank determines the duration of a step.
    """
    slowest = [max(of_rank[plan] for of_rank in times) for plan in range(len(times[0]))]
    best = min(range(len(slowest)), key=lambda plan: (slowest[plan], plan))
    return best if slowest[best] < slowest[0] * (1 - MARGIN) else 0
