"""The figures of a job over time, for the charts of the page. Pure.

A point has sums since the start of the job: the time of all ranks by class (docs/goodput.md), the part of it in which
collectives ran behind computation, and the steps that a rank has finished on average. The browser divides differences
between points. So points can be left out without an error: a series that is full drops every second one, and then
takes points half as often. It covers the whole job.

Agents report at different moments. Steps and time come from the same reports, so their quotient is right at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rendezvous.values.rank_time import CLASSES, JobTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.values.rank_time import RankTime

MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Point:
    at: float  # seconds since the epoch
    generation: int
    ranks: int
    steps: float  # of a rank, in this generation
    spent: tuple[float, ...]  # by CLASSES, of all ranks together
    hidden: float = 0.0  # communication behind computation; some of these classes contain it

    def as_list(self) -> list[Any]:
        sums = [round(seconds, 3) for seconds in (*self.spent, self.hidden)]
        return [round(self.at, 1), self.generation, self.ranks, round(self.steps, 2), *sums]


def point_of(at: float, generation: int, time: JobTime, ranks: Sequence[RankTime]) -> Point:
    steps = sum(rank.steps for rank in ranks) / len(ranks) if ranks else 0.0
    spent = tuple(getattr(time.spent, name) for name in CLASSES)
    return Point(at, generation, time.ranks, steps, spent, time.hidden)


@dataclass(frozen=True, slots=True)
class Series:
    """The points of a job. Of a full one, points are `every` times as far apart as those that are offered."""

    points: tuple[Point, ...] = ()
    every: int = 1
    skipped: int = 0
    added: int = 0  # all that were ever added: what a reader has seen

    def offered(self, point: Point) -> Series:
        last = self.points[-1] if self.points else None
        if last is not None and last.spent == point.spent and last.generation == point.generation:
            return self
        if last is not None and last.generation == point.generation and self.skipped + 1 < self.every:
            return Series(self.points, self.every, self.skipped + 1, self.added)
        points, every = (*self.points, point), self.every
        if len(points) > MOST_POINTS:
            points, every = points[::2], every * 2
        return Series(points, every, 0, self.added + 1)
