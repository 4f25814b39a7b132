"""Goodput: whatever happens and whatever pages say, the classes of time add up to the time that has passed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_story import agent, running, spec

from launcher.health.time_ledger import LedgerStage, TimeLedger
from rendezvous.diagnosing import goodput
from rendezvous.rounds.view import view_of
from rendezvous.values.events import RankTimesReported
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.rank_time import CLASSES, JobTime, NodeTime, RankTime, TimeSpent, TimeState, in_words
from rendezvous.values.rank_view import RankPhase, RankView, Repeat, Totals

seconds = st.floats(0.0, 1e6)
phases = st.dictionaries(st.sampled_from(list(RankPhase)), seconds).map(lambda found: tuple(found.items()))
pages = st.none() | st.builds(
    RankView,
    rank=st.just(3),
    known=st.booleans(),
    phase=st.sampled_from(list(RankPhase)),
    phase_s=seconds,
    step=st.integers(0, 2),
    mean_step_s=st.sampled_from([0.0, 1.0]),
    phase_times=phases,
    totals=st.builds(Totals, repeats=st.booleans(), repeated=phases),
)
moves = st.tuples(seconds, st.sampled_from([*LedgerStage, "failed", "resumed", "looked"]), pages)


@given(st.lists(moves, max_size=12), seconds, pages)
def test_the_classes_add_up_to_the_time_that_has_passed(
    what: list[tuple[float, LedgerStage | str, RankView | None]], last_s: float, at_last: RankView | None
) -> None:
    ledger, now = TimeLedger(1000.0), 1000.0
    for pause_s, move, view in what:
        now += pause_s
        if move == "failed":
            ledger = ledger.failed(now, view)
        elif move == "resumed":
            ledger = ledger.resumed(now, view or RankView(3))
        elif move == "looked":
            ledger = ledger.looked(view)
        else:
            ledger = ledger.moved(LedgerStage(move), now, view)
    spent = ledger.so_far(now + last_s, at_last)
    assert spent.total == pytest.approx(now + last_s - 1000.0, rel=1e-9, abs=1e-6)
    assert all(getattr(spent, name) >= -1e-6 for name in CLASSES)


def page(*times: tuple[RankPhase, float], **more: object) -> RankView:
    return RankView(0, pid=7, known=True, phase_times=times, **more)  # type: ignore[arg-type]


TRAINED = page(
    (RankPhase.STARTING, 1.0),
    (RankPhase.DATA, 2.0),
    (RankPhase.FORWARD, 3.0),
    (RankPhase.COMMUNICATE, 4.0),
    (RankPhase.SECTION, 0.5),
    phase=RankPhase.COMMUNICATE,
    phase_s=1.5,
)


def test_the_time_of_a_process_is_what_its_page_says_and_the_rest_is_its_start() -> None:
    ledger = TimeLedger(0.0).moved(LedgerStage.FORKING, 2.0, None).moved(LedgerStage.RUNNING, 3.0, None)
    spent = ledger.so_far(14.0, TRAINED)
    assert spent == TimeSpent(start=3.0 + 1.0 + 0.5, data=2.0, forward=3.0, communication=4.0, idle=0.5)
    assert ledger.so_far(14.0, RankView(0)) == TimeSpent(start=3.0, idle=11.0)  # it shows nothing


def test_a_restart_is_lost_part_by_part() -> None:
    ledger = TimeLedger(0.0, LedgerStage.RUNNING).failed(10.5, TRAINED)
    ledger = ledger.moved(LedgerStage.JOINING, 12.0, None).moved(LedgerStage.FORKING, 15.0, None)
    ledger = ledger.moved(LedgerStage.RUNNING, 15.25, None)
    again = page((RankPhase.STARTING, 2.0), (RankPhase.FORWARD, 8.0), totals=Totals(repeats=True))
    spent = ledger.so_far(25.25, again)
    lost = {name: getattr(spent, name) for name in ("detect", "stop", "meet", "fork", "init", "redo")}
    assert lost == {"detect": 1.5, "stop": 1.5, "meet": 3.0, "fork": 0.25, "init": 2.0, "redo": 8.0}
    assert spent.communication == 2.5  # the rest of the last call was no progress
    done = replace(again, totals=Totals(repeated=((RankPhase.FORWARD, 3.0),)))
    assert (ledger.so_far(25.25, done).redo, ledger.so_far(25.25, done).forward) == (3.0, 3.0 + 5.0)


def test_a_stop_without_a_failure_takes_nothing_back() -> None:
    spent = TimeLedger(0.0, LedgerStage.RUNNING).moved(LedgerStage.STOPPING, 10.5, TRAINED).so_far(11.0, None)
    assert (spent.detect, spent.stop, spent.communication) == (0.0, 0.5, 4.0)


def test_a_rank_that_failed_or_finished_waits_for_what_follows() -> None:
    failed = (
        TimeLedger(0.0, LedgerStage.RUNNING).moved(LedgerStage.FAILED, 10.5, TRAINED).failed(12.0, TRAINED)
    )
    assert failed.closed.detect == 1.5
    assert (
        TimeLedger(0.0, LedgerStage.RUNNING)
        .moved(LedgerStage.FINISHED, 10.5, TRAINED)
        .so_far(20.5, None)
        .waiting
        == 10.0
    )


def test_a_process_that_was_paused_continues_where_its_page_was() -> None:
    ledger = TimeLedger(0.0, LedgerStage.RUNNING).failed(10.5, TRAINED).resumed(20.0, TRAINED)
    later = page(*TRAINED.phase_times[:3], (RankPhase.COMMUNICATE, 4.0), (RankPhase.BACKWARD, 5.0))
    spent = ledger.so_far(25.0, later)
    assert (spent.stop, spent.backward, spent.forward) == (9.5, 5.0, 3.0)
    assert spent.total == 25.0


def stands(seconds: float, **more: object) -> RankView:
    """In the forward of the second step. The first one took a second."""
    totals = Totals(open_s=3.0 + seconds, first_step_s=1.0 + seconds)
    times = ((RankPhase.STARTING, 1.0), (RankPhase.FORWARD, 2.0 + seconds))
    return page(*times, step=1, phase=RankPhase.FORWARD, phase_s=1.0 + seconds, totals=totals, **more)


def test_a_forward_that_makes_no_progress_is_not_goodput() -> None:
    """torch waits in C++ there, for ranks that exchange the order of their buckets."""
    ledger = TimeLedger(0.0, LedgerStage.RUNNING)
    standing = ledger.so_far(100.0, stands(97.0))
    assert (standing.forward, standing.waiting, standing.start) == (11.0, 88.0, 1.0)
    hung = ledger.looked(stands(97.0)).failed(100.0, stands(97.0))
    assert (hung.closed.detect, hung.closed.forward, hung.closed.waiting) == (98.0, 1.0, 0.0)
    for seen_s in (30.0, 60.0, 97.0):
        ledger = ledger.looked(stands(seen_s))
    went_on = page((RankPhase.STARTING, 1.0), (RankPhase.FORWARD, 99.0), step=2, mean_step_s=50.0)
    assert ledger.looked(went_on).so_far(100.0, went_on).waiting == 88.0
    slow = stands(97.0, mean_step_s=50.0)  # such steps are usual here
    assert TimeLedger(0.0, LedgerStage.RUNNING).so_far(100.0, slow).waiting == 0.0


def hidden(seconds: float) -> RankView:
    return page(totals=Totals(hidden_s=seconds))


def test_communication_behind_computation_is_added_up_over_processes() -> None:
    ledger = TimeLedger(0.0, LedgerStage.RUNNING)
    assert ledger.hidden_so_far(hidden(3.0)) == 3.0
    ledger = ledger.failed(10.0, hidden(4.0))
    assert (ledger.hidden_so_far(None), ledger.hidden_so_far(hidden(9.0))) == (4.0, 4.0)
    anew = ledger.moved(LedgerStage.FORKING, 11.0, None).moved(LedgerStage.RUNNING, 12.0, None)
    assert anew.hidden_so_far(hidden(1.5)) == 5.5
    same_process = ledger.resumed(12.0, hidden(4.5))
    assert same_process.hidden_so_far(hidden(6.0)) == 5.5


# --- of the whole job ----------------------------------------------------------------------------------


def report(
    *communication: float, whole: float = 10.0, first: int = 0, **more: object
) -> tuple[RankTime, ...]:
    return tuple(
        RankTime(first + i, TimeSpent(backward=whole - each, communication=each), has_page=True, **more)  # type: ignore[arg-type]
        for i, each in enumerate(communication)
    )


def test_who_spends_least_in_collectives_waits_for_nobody() -> None:
    state = goodput.reported(TimeState(), "a", "1", report(1.0, 4.0))
    first, second = goodput.ranks_of(state, ["a"])
    assert (first.spent.communication, first.spent.waiting) == (1.0, 0.0)
    assert second.spent.communication == pytest.approx(1.0)
    assert second.spent.waiting == pytest.approx(3.0)
    state = goodput.reported(state, "b", "1", report(8.0, whole=20.0, first=2))
    assert goodput.ranks_of(state, ["b"])[0].spent.waiting == pytest.approx(8.0 - 0.1 * 20.0)
    state = goodput.reported(state, "a", "1", report(6.0, 9.0, whole=20.0))  # now both spend half of it there
    assert [rank.spent.waiting for rank in goodput.ranks_of(state, ["a"])] == pytest.approx([1.0, 4.0])


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(seconds, min_size=2, max_size=2), seconds), max_size=8)
)
def test_what_is_divided_adds_up_to_what_was_reported(reports: list[tuple[str, list[float], float]]) -> None:
    state, last = TimeState(), dict[str, tuple[RankTime, ...]]()
    for node, communication, whole in reports:
        last[node] = report(*communication, whole=whole)  # a page may say anything
        state = goodput.reported(state, node, "1", last[node])
    for node, ranks in last.items():
        for raw, divided in zip(ranks, goodput.ranks_of(state, [node]), strict=True):
            assert divided.spent.total == pytest.approx(raw.spent.total, rel=1e-9, abs=1e-6)
            assert 0.0 <= divided.spent.waiting <= raw.spent.communication


def test_the_time_of_an_agent_that_was_replaced_stays_in_the_sum() -> None:
    state = goodput.reported(TimeState(), "a", "1", report(1.0, 1.0))
    state = goodput.reported(state, "a", "2", report(2.0, 2.0))
    whole = goodput.whole(state)
    assert whole is not None
    assert (whole.ranks, whole.spent.total) == (2, 40.0)
    assert goodput.whole(TimeState()) is None


def test_hidden_communication_of_a_replaced_agent_stays_in_the_sum() -> None:
    state = goodput.reported(TimeState(), "a", "1", report(1.0, 1.0, hidden=2.0))
    state = goodput.reported(state, "b", "1", report(1.0, first=2, hidden=4.0))
    state = goodput.reported(state, "a", "2", report(1.0, 1.0, hidden=0.5))
    job = goodput.whole(state)
    assert job is not None
    assert job.hidden == 2 * 2.0 + 4.0 + 2 * 0.5


@pytest.mark.parametrize(
    ("ranks", "before", "expected"),
    [
        ([(100, 80, False), (100, 0, False)], Repeat(), Repeat(steps=20)),  # only one of them saves
        ([(100, 0, False)], Repeat(), Repeat(steps=100)),
        ([(10, 0, False)], Repeat(steps=20), Repeat(steps=20)),  # it failed while it repeated
        ([(10, 5, False)], Repeat(steps=20), Repeat(steps=15)),
        ([(10, 10, False)], Repeat(), Repeat()),
        ([(137, 100, True)], Repeat(), Repeat(up_to=137)),
        ([(120, 120, True)], Repeat(up_to=137), Repeat(up_to=137)),
        ([(137, 137, True)], Repeat(), Repeat()),
        ([], Repeat(), Repeat()),
    ],
)
def test_what_is_done_again(ranks: list[tuple[int, int, bool]], before: Repeat, expected: Repeat) -> None:
    found = tuple(RankTime(i, TimeSpent(), *each) for i, each in enumerate(ranks))
    state = TimeState(FrozenMap([("a", NodeTime("1", found, (0.0,) * len(found)))]), repeat=before)
    assert goodput.next_generation(state, ["a"]).repeat == expected


def test_a_job_knows_the_time_of_its_ranks_and_what_they_do_again() -> None:
    story = running(spec(1), "a")
    story.happens(RankTimesReported(agent("a"), report(1.0, 3.0, steps=50, saved_steps=40)))
    assert story.effects == ()  # nothing is stored or sent for it
    view = view_of("job", story.state, story.now)
    assert [rank.spent.waiting for rank in view.ranks] == pytest.approx([0.0, 2.0])
    assert view.time is not None
    assert view.time.spent.total == 20.0
    story.fails("a", 0).stop("a")
    (assigned,) = (each for each in story.told("a") if hasattr(each, "assignment"))
    assert assigned.assignment.repeat_steps == 10
    stranger = replace(agent("a"), incarnation="other")
    before = story.state
    assert story.happens(RankTimesReported(stranger, report(1.0, 1.0))).state is before
    assert (
        story.happens(RankTimesReported(agent("a"), report(*[1.0] * 3))).state is before
    )  # it has two ranks


def test_in_words() -> None:
    spent = TimeSpent(forward=30.0, backward=50.0, start=10.0, init=6.0, redo=3.99, idle=0.01)
    assert in_words(JobTime(2, spent)) == (
        "goodput 80.0 % of 2 ranks x 50.0 s: backward 50.0 %, forward 30.0 %, start 10.0 %, "
        "lost to stops and restarts 10.0 % (init 6.0 %, redo 4.0 %)"
    )
    assert in_words(JobTime(0, TimeSpent())) == ""
