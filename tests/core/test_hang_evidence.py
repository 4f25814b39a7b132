"""Without a limit of the user, what is evidence of a hang? Reports of all ranks in, a verdict or nothing out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.diagnosing.diagnosis import Finding, FindingKind, diagnose
from rendezvous.values.rank_view import Collective, GroupView, RankPhase, RankReport

LIMIT = 600.0
LONG = 700.0


def rank_report(
    rank: int, n: int, entered: int, *, without_life_s: float = LONG, **how: object
) -> RankReport:
    """A rank that has been through this many collectives of the world, and is in none."""
    groups = (GroupView("0", n, f"0-{n - 1}", entered, entered),)
    report = RankReport(rank, True, without_life_s, None, RankPhase.IDLE, LONG, 4, groups=groups, process="S")
    return replace(report, **({"idle_s": without_life_s, "idle_limit_s": LIMIT} | how))  # type: ignore[arg-type]


def inside(
    rank: int, n: int, seq: int, op: str = "all_reduce", *, since_s: float = LONG, **how: object
) -> RankReport:
    """A rank that waits in a collective."""
    call = Collective(seq, "0", seq, op, "float32", 8, entered_s=since_s)
    groups = (GroupView("0", n, f"0-{n - 1}", seq, seq - 1),)
    report = rank_report(rank, n, seq, calls=(call,), groups=groups, without_life_s=since_s)
    return replace(report, **({"phase": RankPhase.COMMUNICATE} | how))  # type: ignore[arg-type]


def verdict(*reports: RankReport, world: int = 0) -> object:
    return diagnose({report.rank: report for report in reports}, world or len(reports))


WAITS = inside(0, 2, 5)
AWAITED = rank_report(1, 2, 4)


@pytest.mark.parametrize("phase", RankPhase)
def test_a_rank_without_a_sign_of_life_that_another_waits_for_hangs(phase: RankPhase) -> None:
    found = verdict(WAITS, replace(AWAITED, phase=phase))
    assert isinstance(found, Finding)
    assert found.kind in (FindingKind.ABSENT, FindingKind.DESYNC)


@pytest.mark.parametrize("process", ["T", "F", "D"])
def test_so_does_one_that_is_stopped_or_stuck(process: str) -> None:
    found = verdict(WAITS, replace(AWAITED, process=process))
    assert isinstance(found, Finding)
    assert [each.rank for each in found.blamed] == [1]
    unseen = [
        replace(WAITS, calls=(), recorded=WAITS.calls),
        replace(WAITS, rank=2, calls=(), recorded=WAITS.calls),
    ]
    stopped = verdict(*unseen, replace(AWAITED, process=process))
    assert isinstance(stopped, Finding), "the buckets of torch's DDP are in the recorders only"
    assert [each.rank for each in stopped.blamed] == [1]


@pytest.mark.parametrize(
    "awaited",
    [
        replace(AWAITED, stalled_s=1.0),  # it computes
        replace(AWAITED, stalled_s=1.0, idle_s=1.0),  # it reads, writes, prints, or its children work
        replace(AWAITED, idle_limit_s=7200.0),  # the script has said that this may take two hours
        replace(AWAITED, process="t"),  # a person debugs it
        replace(AWAITED, known=False, stalled_s=1.0),  # it starts
    ],
)
def test_one_that_lives_is_waited_for(awaited: RankReport) -> None:
    assert not isinstance(verdict(WAITS, awaited), Finding)


def test_a_third_rank_that_lives_may_be_what_the_silent_one_waits_for() -> None:
    """In the store, for a file, for a queue: pages do not show that."""
    silent, waits, works = rank_report(1, 3, 4), inside(0, 3, 5), rank_report(2, 3, 4, stalled_s=0.0)
    assert isinstance(verdict(waits, silent, works), type(None))
    assert isinstance(verdict(waits, silent, replace(works, stalled_s=LONG)), Finding)
    assert isinstance(verdict(waits, silent, world=3), type(None)), "an agent has not answered"


def test_a_rank_that_waits_may_spin_but_its_children_may_work() -> None:
    assert isinstance(verdict(replace(WAITS, stalled_s=0.0), AWAITED), Finding)
    assert isinstance(verdict(replace(WAITS, stalled_s=0.0, idle_s=0.0), AWAITED), type(None))


def test_the_one_who_waits_has_waited_for_its_own_limit_too() -> None:
    assert isinstance(verdict(inside(0, 2, 5, since_s=590.0), AWAITED), type(None))
    assert isinstance(verdict(replace(WAITS, idle_limit_s=7200.0), AWAITED), type(None))


def test_where_nobody_waits_nothing_hangs() -> None:
    assert verdict(rank_report(0, 2, 4), AWAITED) is None
    assert verdict(rank_report(0, 1, 4)) is None
    stopped = [replace(each, process="T") for each in (WAITS, AWAITED)]
    assert verdict(*stopped) is None


def test_all_in_the_same_collective_is_no_evidence() -> None:
    """It may be slow. torch's own timeout ends it."""
    assert isinstance(verdict(inside(0, 2, 5), inside(1, 2, 5)), type(None))


def test_ranks_in_different_collectives_need_no_long_wait() -> None:
    both = inside(0, 2, 5, since_s=10.0), inside(1, 2, 5, "broadcast", since_s=12.0)
    found = verdict(*(replace(each, idle_limit_s=7200.0, stalled_s=0.0, idle_s=0.0) for each in both))
    assert isinstance(found, Finding)
    assert found.kind is FindingKind.DESYNC
    short = verdict(both[0], inside(1, 2, 5, "broadcast", since_s=9.0))
    assert isinstance(short, type(None))


def test_a_mismatch_counts_only_while_all_members_wait_in_it() -> None:
    """A failed call that the script has caught makes one rank count differently."""
    other = Collective(5, "0", 5, "broadcast", "float32", 8, entered_s=30.0, finished_s=20.0)
    ahead = rank_report(1, 2, 5, calls=(other,), stalled_s=0.0)
    assert not isinstance(verdict(inside(0, 2, 5, since_s=30.0), ahead), Finding)
    third = rank_report(2, 3, 4, stalled_s=0.0)
    two = inside(0, 3, 5, since_s=30.0), inside(1, 3, 5, "broadcast", since_s=30.0)
    assert isinstance(verdict(*two, third), type(None))


def test_a_cycle_of_waits_needs_the_whole_limit() -> None:
    """Other threads of these ranks may end it."""

    def receives(rank: int, since_s: float) -> RankReport:
        call = Collective(1, "0", 1, "recv", "float32", 8, peer=1 - rank, entered_s=since_s)
        return inside(rank, 2, 1, since_s=since_s, calls=(call,), groups=(GroupView("0", 2, "0-1"),))

    assert isinstance(verdict(receives(0, 300.0), receives(1, 300.0)), type(None))
    found = verdict(receives(0, LONG), receives(1, LONG))
    assert isinstance(found, Finding)
    assert found.kind is FindingKind.DEADLOCK


def test_one_that_ended_with_0_is_never_named() -> None:
    found = verdict(WAITS, replace(AWAITED, alive=False, process="Z"))
    assert isinstance(found, Finding)
    assert [each.rank for each in found.blamed] == [0]
    assert not found.certain
    uploads = rank_report(0, 2, 4, phase=RankPhase.EXITING)
    assert verdict(uploads, replace(AWAITED, alive=False, process="Z")) is None


# --- any world ----------------------------------------------------------------------------------------------

_times = st.sampled_from([0.0, 12.0, 599.0, 601.0, 9000.0])


@st.composite
def worlds(draw: st.DrawFn) -> list[RankReport]:
    n = draw(st.integers(1, 5))
    reports = []
    for rank in range(n):
        idle_s, since_s, seq = draw(_times), draw(_times), draw(st.integers(1, 3))
        how = {
            "idle_s": idle_s,
            "stalled_s": min(draw(_times), idle_s),
            "idle_limit_s": draw(st.sampled_from([600.0, 7200.0])),
            "phase": draw(st.sampled_from(RankPhase)),
            "alive": draw(st.sampled_from([True, True, True, False])),
            "process": draw(st.sampled_from(["S", "R", "D", "T", "F"])),
            "known": draw(st.sampled_from([True, True, False])),
            "busy": draw(st.booleans()),
        }
        waits = draw(st.booleans())
        report = inside(rank, n, seq, since_s=since_s, **how) if waits else rank_report(rank, n, seq, **how)
        if draw(st.booleans()):
            report = replace(report, calls=(), recorded=report.calls)
        reports.append(report)
    return reports


def is_lively(report: RankReport) -> bool:
    waits = any(call.finished_s is None for call in (*report.calls, *report.recorded))
    without_life_s = report.idle_s if waits else report.stalled_s
    assert without_life_s is not None
    assert report.idle_limit_s is not None
    return report.alive and without_life_s < report.idle_limit_s


@given(worlds())
def test_a_job_that_lives_or_in_which_nobody_waits_is_never_ended(reports: list[RankReport]) -> None:
    found = verdict(*reports)
    waiting = [r for r in reports if r.alive and (r.calls or r.recorded)]
    if not waiting or any(map(is_lively, reports)) or len(reports) == 1:
        assert not isinstance(found, Finding)
    if isinstance(found, Finding):
        alive = {report.rank for report in reports if report.alive}
        assert all(each.rank in alive for each in found.blamed), "one that has ended is not named"
