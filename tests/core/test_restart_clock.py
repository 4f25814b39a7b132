"""The parts of a restart on one node, from the moments that its agent sees and from the pages of its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.answers.restart_watch import (
    RestartClock,
    failed,
    forked,
    looked,
    started,
    stop_ordered,
    stopped,
    times,
)
from rendezvous.values.questions import RestartTimes
from rendezvous.values.rank_view import ProcessView, RankPhase, RankView


def view(rank: int, step: int, **more: object) -> RankView:
    spent = ((RankPhase.STARTING, 3.0), (RankPhase.FORWARD, 0.5 * step), (RankPhase.IDLE, 1.0))
    plain = RankView(rank, pid=10 + rank, known=True, phase=RankPhase.IDLE, step=step, phase_times=spent)
    return replace(plain, last_step_s=0.5 * (step > 0), mean_step_s=0.5 * (step > 1), **more)  # type: ignore[arg-type]


def restarted() -> RestartClock:
    """Fails at 100 with 4 steps; new processes at 104."""
    clock = failed(RestartClock(), 100.0)
    clock = failed(clock, 100.5)  # the first one counts
    clock = stop_ordered(clock, 101.0, [view(0, 4), view(1, 3)])
    clock = failed(clock, 101.5)  # because of the stop
    clock = stopped(clock, 102.0)
    clock = started(clock, 103.5, 2, [view(0, 4, process=ProcessView(alive=False))])
    return forked(forked(clock, 103.9), 104.0)


def test_every_part_has_its_time() -> None:
    clock = looked(restarted(), 108.0, [view(0, 0), view(1, 0)])
    assert times(clock).init_s == 3.0
    assert not clock.is_complete
    clock = looked(clock, 110.0, [view(0, 2, step_s=0.2), view(1, 1, step_s=0.7)])
    assert times(clock).first_step_s == pytest.approx(110.0 - 0.7 - 107.0)
    clock = looked(clock, 112.0, [view(0, 5, step_s=0.1), view(1, 4, step_s=0.6)])
    assert clock.is_complete
    assert times(clock) == RestartTimes(2, 1.0, 1.0, 1.5, 0.5, 3.0, pytest.approx(2.3), pytest.approx(2.1))


def test_a_late_look_finds_the_same_moments() -> None:
    late = looked(restarted(), 120.0, [view(rank, 20, step_s=0.5) for rank in (0, 1)])
    assert late.begun_at == 120.0 - 10.0 - 1.0
    assert late.stepped_at == 120.0 - 0.5 - 19 * 0.5
    assert late.redone_at == 120.0 - 0.5 - 16 * 0.5


def test_the_first_start_is_no_restart() -> None:
    clock = started(RestartClock(), 5.0, 1, [])
    assert clock.is_complete
    assert looked(forked(clock, 6.0), 9.0, [view(0, 3)]) == clock


def test_a_node_whose_ranks_did_not_fail_does_not_know_when_the_failure_was() -> None:
    clock = stopped(stop_ordered(RestartClock(), 10.0, [view(0, 7)]), 11.0)
    assert (times(clock).detect_s, times(clock).stop_s) == (None, 1.0)


def test_a_second_failure_begins_anew() -> None:
    complete = looked(restarted(), 120.0, [view(rank, 20) for rank in (0, 1)])
    again = stop_ordered(failed(complete, 130.0), 130.5, [view(0, 20)])
    assert (again.failed_at, again.ordered_at, again.stopped_at, again.reached) == (130.0, 130.5, None, 20)


def test_a_failure_before_the_redo_ended_begins_anew() -> None:
    clock = looked(restarted(), 108.0, [view(0, 0), view(1, 0)])
    assert stop_ordered(failed(clock, 109.0), 109.5, [view(0, 1)]).failed_at == 109.0


def test_ranks_that_keep_their_processes_count_their_steps_from_there() -> None:
    clock = stopped(stop_ordered(RestartClock(), 10.0, [view(0, 7), view(1, 7)]), 11.0)
    clock = started(clock, 12.0, 2, [view(0, 7), view(1, 7)])
    clock = looked(clock, 12.5, [view(0, 7, step_s=3.0), view(1, 7, step_s=3.0)])
    assert (clock.begun_at, clock.stepped_at) == (12.0, None)
    clock = looked(clock, 14.0, [view(0, 8, step_s=0.5), view(1, 8, step_s=0.4)])
    assert clock.stepped_at == pytest.approx(13.6)


def test_pages_that_are_not_written_yet_say_nothing() -> None:
    clock = restarted()
    assert looked(clock, 105.0, [view(0, 9), RankView(1)]) == clock
    assert looked(clock, 105.0, []) == clock
