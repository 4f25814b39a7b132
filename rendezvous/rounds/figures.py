"""The figures of a job over time, for the charts of the page, also after its end. Pure.

A point has sums since the start of the job: the time of all ranks by class (docs/goodput.md), the part of it in which
collectives ran behind computation, and the steps that a rank has finished on average. The browser divides differences
between points. So points can be left out without an error: a series that is full drops every second one, and then
takes points half as often. It covers the whole job.

Agents report at different moments. Steps and time come from the same reports, so their quotient is right at any time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing import goodput
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import CLASSES, JobTime, TimeSpent  # the codec reads these annotations

if TYPE_CHECKING:
    from rendezvous.values.job_state import JobState

MOST_POINTS = 300


@dataclass(frozen=True, slots=True)
class TimePoint:
    at: float  # seconds since the epoch
    generation: int
    steps: float  # of a rank, in this generation
    time: JobTime


def point_of(at: float, state: JobState) -> TimePoint | None:
    """None: its ranks have not shown what they do."""
    time = state.outcome.time if state.outcome is not None else goodput.whole(state.time)
    if time is None:
        return None
    placements = state.world.placements if state.world is not None else ()
    ranks = goodput.ranks_of(state.time, [place.agent.node for place in placements])
    steps = sum(rank.steps for rank in ranks) / len(ranks) if ranks else 0.0
    spent = TimeSpent(*(round(getattr(time.spent, name), 3) for name in CLASSES))
    time = replace(time, spent=spent, hidden=round(time.hidden, 3))
    return TimePoint(round(at, 1), state.generation, round(steps, 2), time)


@dataclass(frozen=True, slots=True)
class Series:
    """The points of a job. Of a full one, points are `every` times as far apart as those that are offered."""

    points: tuple[TimePoint, ...] = ()
    every: int = 1
    skipped: int = 0

    def offered(self, point: TimePoint, is_last: bool = False) -> Series:
        last = self.points[-1] if self.points else None
        if last is not None and last.time.spent == point.time.spent and last.generation == point.generation:
            return self
        is_near = last is not None and last.generation == point.generation and not is_last
        if is_near and self.skipped + 1 < self.every:
            return Series(self.points, self.every, self.skipped + 1)
        points, every = (*self.points, point), self.every
        if len(points) > MOST_POINTS:
            points, every = points[::2], every * 2
        return Series(points, every)
