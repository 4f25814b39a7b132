"""The points of the charts of a job: few, whatever its length, and from its beginning to its end."""

from __future__ import annotations

from rendezvous.rounds.event_log import MOST_POINTS, Series, TimePoint, point_of
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import JobState
from rendezvous.values.rank_time import JobTime, NodeTime, RankTime, TimeSpent, TimeState


def point(number: int, generation: int = 1, seconds: float | None = None) -> TimePoint:
    spent = TimeSpent(forward=number + 1.0 if seconds is None else seconds)
    return TimePoint(number, generation, number, JobTime(1, spent))


def test_a_series_covers_the_whole_job() -> None:
    series = Series()
    for number in range(5 * MOST_POINTS):
        series = series.offered(point(number))
    assert MOST_POINTS // 2 <= len(series.points) <= MOST_POINTS
    assert series.points[0].at == 0
    assert series.points[-1].at >= 5 * MOST_POINTS - series.every
    gaps = {b.at - a.at for a, b in zip(series.points, series.points[1:], strict=False)}
    assert gaps == {series.every}
    assert series.offered(point(5 * MOST_POINTS + 1), is_last=True).points[-1].at == 5 * MOST_POINTS + 1


def test_a_point_without_news_is_left_out() -> None:
    series = Series().offered(point(1, seconds=3.0)).offered(point(2, seconds=3.0))
    assert series.points == (point(1, seconds=3.0),)
    assert len(series.offered(point(3, 2, seconds=3.0)).points) == 2  # a new generation is news


def test_a_point_has_what_agents_have_told() -> None:
    assert point_of(1.0, JobState()) is None
    ranks = tuple(RankTime(rank, TimeSpent(forward=3.00049), has_page=True) for rank in range(2))
    state = JobState(time=TimeState(FrozenMap([("n", NodeTime("i", ranks, (0.0, 0.0)))])))
    assert point_of(1.04, state) == TimePoint(1.0, 0, 0.0, JobTime(2, TimeSpent(forward=6.001)))
