"""Who is the reason? Worlds with one fault put into them: the guilty is named, and never an innocent with certainty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.diagnosing.diagnosis import Finding, FindingKind, Patience, diagnose
from rendezvous.values.rank_view import Collective, GroupView, RankPhase, RankReport
from rendezvous.values.types import Doubt

LIMIT = 3.0
WORLD = "0"


def call(
    seq: int,
    group: str = WORLD,
    op: str = "all_reduce",
    numel: int = 1000,
    done: bool = False,
    peer: int = -1,
) -> Collective:
    return Collective(
        seq, group, seq, op, "float32", numel, peer=peer, entered_s=3.2, finished_s=3.1 if done else None
    )


def waiting(rank: int, n: int, seq: int, group: str = WORLD, members: str = "", size: int = 0) -> RankReport:
    """A rank that is in its collective number `seq`, and waits."""
    view = GroupView(group, size or n, members or f"0-{n - 1}", seq, seq - 1)
    calls = (call(seq - 1, group, done=True), call(seq, group)) if seq > 1 else (call(seq, group),)
    return RankReport(
        rank, True, 3.2, LIMIT, RankPhase.COMMUNICATE, 3.2, seq, calls=calls, groups=(view,), process="S"
    )


def absent(rank: int, n: int, came_to: int, **how: object) -> RankReport:
    """A rank that has finished number `came_to`, and does something else since."""
    view = GroupView(WORLD, n, f"0-{n - 1}", came_to, came_to)
    report = RankReport(
        rank,
        True,
        3.2,
        LIMIT,
        RankPhase.DATA,
        3.2,
        came_to,
        calls=(call(came_to, done=True),),
        groups=(view,),
    )
    return replace(report, **({"process": "S"} | how))  # type: ignore[arg-type]


def found(*reports: RankReport, world: int = 0) -> Finding:
    finding = diagnose({report.rank: report for report in reports}, world or len(reports))
    assert isinstance(finding, Finding), finding
    return finding


def blamed(finding: Finding) -> list[int]:
    return [each.rank for each in finding.blamed]


# --- absent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"phase": RankPhase.DATA}, "has made no progress for 3.2 s in its data loader (sleeping)"),
        (
            {"phase": RankPhase.CHECKPOINT, "process": "D", "wchan": "nfs_wait"},
            "uninterruptible sleep in nfs_wait",
        ),
        ({"process": "T"}, "has been stopped by a signal"),
        ({"phase": RankPhase.FORWARD, "busy": True, "process": "R"}, "in its forward pass (computing)"),
        ({"phase": RankPhase.SECTION, "section": "metrics"}, 'in the section "metrics"'),
    ],
)
def test_the_rank_that_never_came_is_named_with_what_it_does(how: dict[str, object], says: str) -> None:
    others = (waiting(0, 4, 12), waiting(2, 4, 12), waiting(3, 4, 12))
    finding = found(absent(1, 4, 11, **how), *others)
    assert (blamed(finding), finding.certain, finding.kind) == ([1], True, FindingKind.ABSENT)
    reason = finding.blamed[0].reason
    assert says in reason
    assert "ranks 0, 2 and 3 have waited for it for 3.2 s in all_reduce #12 (1,000 x float32)" in reason
    assert "its last collective is #11" in reason


def test_one_that_ended_without_an_error_is_never_the_cause() -> None:
    ended = absent(1, 3, 11, alive=False, process="Z")
    finding = found(waiting(0, 3, 12), ended, waiting(2, 3, 12))
    assert (blamed(finding), finding.certain, finding.suspects) == ([0], False, ())
    assert finding.doubt_about(finding.blamed[0]) is Doubt.NO_RANK
    told = "rank 1 has exited without an error; ranks 0 and 2 have waited for it for 3.2 s in all_reduce #12"
    assert finding.blamed[0].reason.startswith(told)
    unseen_by_pages = found(
        unseen(0, RankPhase.BACKWARD, 40), replace(unseen(1, RankPhase.IDLE, 40), alive=False, process="Z")
    )
    assert 1 not in blamed(unseen_by_pages)


def test_one_that_sleeps_in_its_forward_is_certain_only_against_more_than_itself() -> None:
    """It may wait in a collective that cannot be seen, as torch's own DDP does."""
    asleep = absent(1, 2, 11, phase=RankPhase.FORWARD)
    finding = found(waiting(0, 2, 12), asleep)
    assert (blamed(finding), finding.certain) == ([1], False)
    assert finding.doubt_about(finding.blamed[0]) is Doubt.MAY_WAIT
    assert finding.suspects == (1,)
    assert found(waiting(0, 3, 12), replace(asleep, groups=()), waiting(2, 3, 12)).certain


def test_one_rank_that_waits_elsewhere_than_all_others_is_the_stranger() -> None:
    others = [absent(rank, 4, 11, phase=RankPhase.BACKWARD) for rank in (0, 2, 3)]
    finding = found(waiting(1, 4, 12), *others)
    assert (blamed(finding), finding.certain) == ([1], False)
    assert (
        "waits in all_reduce #12 (1,000 x float32), which ranks 0, 2 and 3 never entered"
        in finding.blamed[0].reason
    )


def test_several_that_are_missing_are_named_together() -> None:
    finding = found(waiting(0, 3, 12), absent(1, 3, 11), absent(2, 3, 11))
    assert blamed(finding) == [1, 2]
    assert finding.blamed[0].reason.endswith("; the same for rank 2")


def test_one_within_its_own_budget_is_waited_for() -> None:
    busy = absent(1, 3, 11, phase=RankPhase.CHECKPOINT, limit_s=10.0)
    assert diagnose({0: waiting(0, 3, 12), 1: busy, 2: waiting(2, 3, 12)}, 3) == Patience(pytest.approx(6.8))


def test_waiting_is_followed_to_its_root() -> None:
    """0 waits for 1 in one group, 1 for 2 in another, and 2 for nobody."""
    first = waiting(0, 3, 5, "a", "0-1", 2)
    second = waiting(1, 3, 7, "b", "1-2", 2)
    third = replace(absent(2, 3, 3), groups=(GroupView("b", 2, "1-2", 6, 6),))
    finding = found(first, second, third)
    assert (blamed(finding), finding.certain) == ([2], True)
    assert (
        "rank 1 has waited for it for 3.2 s in all_reduce #7 (1,000 x float32) of group b"
        in finding.blamed[0].reason
    )


def test_a_receive_waits_for_its_sender() -> None:
    receiver = replace(
        waiting(0, 2, 3), calls=(call(1, op="recv", peer=1),), groups=(GroupView(WORLD, 2, "0-1"),)
    )
    finding = found(receiver, replace(absent(1, 2, 2), groups=(GroupView(WORLD, 2, "0-1"),), calls=()))
    assert blamed(finding) == [1]
    assert "recv #1 (1,000 x float32) with rank 1" in finding.blamed[0].reason
    sent = replace(absent(1, 2, 2), calls=(call(1, op="send", peer=0, done=True),))
    assert "rank 0 has waited for it" not in found(receiver, sent).blamed[0].reason


def test_ranks_whose_agent_is_silent_are_suspected_only() -> None:
    finding = found(waiting(0, 3, 12), waiting(2, 3, 12), world=3)
    assert (blamed(finding), finding.certain) == ([1], False)
    assert "its agent did not report its state" in finding.blamed[0].reason


def test_a_broadcast_waits_for_its_root_alone() -> None:
    """Rank 1 is behind as well: it sends nothing that anybody here needs."""
    waits = replace(waiting(0, 4, 12), calls=(call(12, op="broadcast", peer=2),))
    finding = found(waits, replace(waits, rank=3), absent(1, 4, 11), absent(2, 4, 11))
    assert blamed(finding) == [2]


def test_a_member_that_has_never_used_its_group_is_missing_there() -> None:
    """What the others say of the group names it; it has nothing to say itself."""
    waits = waiting(0, 4, 1, "7", "0,2", 2)
    others = (replace(absent(rank, 4, 11), groups=()) for rank in (1, 2, 3))
    assert blamed(found(waits, *others)) == [2]


def test_what_has_left_the_table_of_groups_is_not_held_against_anybody() -> None:
    full = tuple(GroupView(f"g{i}", 4, "0-3", 1, 1) for i in range(8))
    lost_count = replace(absent(1, 4, 11), groups=full, stalled_s=0.1)
    reports = {0: waiting(0, 4, 12), 1: lost_count, 2: waiting(2, 4, 12), 3: waiting(3, 4, 12)}
    finding = diagnose(reports, 4)
    assert not isinstance(finding, Finding) or not finding.certain


def test_one_stopped_within_a_collective_is_the_reason_and_not_those_beside_it() -> None:
    """Rank 0 got through number 12 and is in 13; 1 and 2 wait in 12, in which 3 was stopped: all have entered it."""
    ahead, stopped = waiting(0, 4, 13), replace(waiting(3, 4, 12), process="T")
    finding = found(ahead, waiting(1, 4, 12), waiting(2, 4, 12), stopped)
    assert (blamed(finding), finding.certain) == ([3], True)
    frozen = found(ahead, waiting(1, 4, 12), waiting(2, 4, 12), replace(stopped, process="F"))
    assert "has been frozen by its cgroup for 3.2 s" in frozen.blamed[0].reason
    assert not found(ahead, *(waiting(rank, 4, 12) for rank in (1, 2, 3))).certain


# --- collectives that only the flight recorders have seen ---------------------------------------------


def with_recorder(
    report: RankReport, came_to: int, *, waits: bool, group: str = WORLD, members: str = "0-2"
) -> RankReport:
    """The recorder has seen number `came_to` begin; the page, none of it."""
    view = GroupView(group, 3, members, came_to, came_to - waits)
    return replace(report, recorded=(call(came_to, group, done=not waits),), recorder=(view,))


def in_backward(rank: int, came_to: int, *, waits: bool) -> RankReport:
    return with_recorder(unseen(rank, RankPhase.BACKWARD, 40), came_to, waits=waits)


def test_what_only_the_recorders_have_seen_names_the_one_that_did_not_come() -> None:
    finding = found(
        in_backward(0, 61, waits=True), in_backward(1, 60, waits=False), in_backward(2, 61, waits=True)
    )
    assert (blamed(finding), finding.certain, finding.kind) == ([1], True, FindingKind.ABSENT)
    told = "ranks 0 and 2 have waited for it for 3.2 s in all_reduce #61 (1,000 x float32); its last collective is #60"
    assert told in finding.blamed[0].reason


def test_of_two_ranks_the_one_that_waits_in_nothing_at_all_is_certain() -> None:
    pair = [
        replace(in_backward(r, 61 - r, waits=r == 0), recorder=(GroupView(WORLD, 2, "0-1", 61 - r),))
        for r in (0, 1)
    ]
    finding = found(*pair)
    assert (blamed(finding), finding.certain) == ([1], True)


def test_a_recorder_that_was_not_heard_leaves_everything_to_the_pages() -> None:
    """The two ways to number must not be mixed."""
    silent = unseen(1, RankPhase.BACKWARD, 40)
    finding = found(in_backward(0, 61, waits=True), silent, in_backward(2, 61, waits=True))
    assert (finding.kind, finding.certain) == (FindingKind.ALIKE, False)
    stopped = found(
        in_backward(0, 61, waits=True), replace(silent, process="T"), in_backward(2, 61, waits=True)
    )
    assert (blamed(stopped), stopped.certain) == ([1], True)


def test_pages_that_know_as_much_are_believed() -> None:
    told = [with_recorder(waiting(rank, 3, 12), 12, waits=True) for rank in (0, 2)]
    finding = found(*told, with_recorder(absent(1, 3, 11), 11, waits=False))
    assert (blamed(finding), finding.certain) == ([1], True)
    assert "its last collective is #11" in finding.blamed[0].reason


def test_a_recorder_that_has_forgotten_a_group_says_nothing_of_it() -> None:
    """Its entries are as many as it has room for; what it does not tell of is no sign that a rank stayed behind."""
    forgetful = with_recorder(absent(1, 3, 11), 7, waits=False, group="other", members="1")
    finding = found(*(in_backward(rank, 61, waits=True) for rank in (0, 2)), forgetful)
    assert all("#61" not in each.reason for each in finding.blamed)


# --- desync ---------------------------------------------------------------------------------------------


def test_the_minority_that_entered_something_else_is_named_and_what_it_was() -> None:
    odd = replace(waiting(2, 4, 9), calls=(call(9, numel=10),))
    finding = found(waiting(0, 4, 9), waiting(1, 4, 9), odd, waiting(3, 4, 9))
    assert (blamed(finding), finding.certain, finding.kind) == ([2], True, FindingKind.DESYNC)
    expected = (
        "entered all_reduce #9 (10 x float32), while ranks 0, 1 and 3 entered all_reduce #9 (1,000 x float32)"
    )
    assert finding.blamed[0].reason == expected


def test_a_broadcast_from_another_root_is_another_one() -> None:
    reports = [
        replace(waiting(r, 3, 9), calls=(call(9, op="broadcast", peer=int(r == 1)),)) for r in range(3)
    ]
    finding = found(*reports)
    assert (blamed(finding), finding.certain, finding.kind) == ([1], True, FindingKind.DESYNC)
    reason = finding.blamed[0].reason
    assert reason.startswith(
        "entered broadcast #9 (1,000 x float32) from rank 1, while ranks 0 and 2 entered"
    )
    assert reason.endswith("broadcast #9 (1,000 x float32) from rank 0")


def test_one_against_one_names_both_and_blames_neither() -> None:
    other = replace(waiting(1, 2, 9), calls=(call(9, op="broadcast"),))
    finding = found(waiting(0, 2, 9), other)
    assert (blamed(finding), finding.certain) == ([0, 1], False)
    reason = finding.blamed[0].reason
    assert finding.doubt_about(finding.blamed[0]) is Doubt.CULPRIT
    assert finding.suspects == (0, 1)
    assert "rank 0 entered all_reduce #9" in reason
    assert "rank 1 entered broadcast #9" in reason


# --- deadlock -------------------------------------------------------------------------------------------


def test_two_groups_entered_in_another_order() -> None:
    def first_in(rank: int, group: str, other: str) -> RankReport:
        report = waiting(rank, 4, 1, group)
        return replace(report, groups=(*report.groups, GroupView(other, 4, "0-3", 0, 0)))

    finding = found(*(first_in(rank, "a", "b") for rank in (0, 1, 3)), first_in(2, "b", "a"))
    assert (finding.kind, blamed(finding), finding.certain) == (FindingKind.DEADLOCK, [2], True)
    assert "ranks 0 and 2 wait for each other in a cycle" in finding.blamed[0].reason
    pair = [replace(first_in(0, "a", "b")), first_in(1, "b", "a")]
    groups = {0: ("a", 1), 1: ("b", 1)}
    pair = [
        replace(s, groups=tuple(GroupView(g, 2, "0-1", int(g == groups[s.rank][0])) for g in "ab"))
        for s in pair
    ]
    finding = found(*pair)
    assert (finding.kind, sorted(blamed(finding)), finding.certain) == (FindingKind.DEADLOCK, [0, 1], False)


# --- apart, alike, and nothing -----------------------------------------------------------------------------


def unseen(rank: int, phase: RankPhase, step: int, **how: object) -> RankReport:
    """Under torch's own DDP: phases and steps, and no collective."""
    report = RankReport(rank, True, 3.2, LIMIT, phase, 3.2, step, process="S")
    return replace(report, **how)  # type: ignore[arg-type]


def test_without_collectives_the_one_that_is_behind_is_named() -> None:
    ahead = [unseen(rank, RankPhase.BACKWARD, 40) for rank in (0, 2)]
    finding = found(*ahead, unseen(1, RankPhase.DATA, 40))
    assert (blamed(finding), finding.certain, finding.kind) == ([1], True, FindingKind.APART)
    assert "ranks 0 and 2 are in their backward pass (after step 40)" in finding.blamed[0].reason
    assert blamed(found(*ahead, unseen(1, RankPhase.OPTIMIZER, 39, busy=True))) == [1]
    asleep = found(*ahead, unseen(1, RankPhase.FORWARD, 40))
    assert (blamed(asleep), asleep.certain) == ([1], False)


def test_a_stopped_rank_that_had_entered_is_the_reason() -> None:
    finding = found(waiting(0, 3, 9), replace(waiting(1, 3, 9), process="T"), waiting(2, 3, 9))
    assert (blamed(finding), finding.certain) == ([1], True)


def test_all_entered_and_none_finished_blames_nobody() -> None:
    finding = found(*(waiting(rank, 3, 9) for rank in range(3)))
    assert (finding.kind, finding.certain) == (FindingKind.ALIKE, False)
    assert (finding.doubt_about(finding.blamed[0]), finding.suspects) == (Doubt.NO_RANK, ())
    expected = "all ranks have entered all_reduce #9 (1,000 x float32) and none has finished it"
    assert finding.blamed[0].reason.startswith(expected)


def test_a_lonely_rank_is_its_own_reason() -> None:
    finding = found(unseen(0, RankPhase.DATA, 4))
    assert (blamed(finding), finding.certain) == ([0], True)


def test_one_that_has_finished_is_not_the_reason_why_another_never_ends() -> None:
    ended = absent(1, 2, 12, alive=False, process="Z")
    finding = found(absent(0, 2, 12, phase=RankPhase.IDLE, busy=True), ended)
    assert (blamed(finding), finding.certain) == ([0], True)


@pytest.mark.parametrize("state", ["T", "t", "F"])
def test_a_job_that_somebody_has_stopped_is_left_alone(state: str) -> None:
    reports = {rank: replace(waiting(rank, 3, 9), process=state) for rank in range(3)}
    assert diagnose(reports, 3) is None


def test_a_rank_in_a_debugger_is_left_alone() -> None:
    reports = {0: waiting(0, 2, 9), 1: absent(1, 2, 8, process="t")}
    assert diagnose(reports, 2) is None


def test_nobody_is_overdue_and_nothing_is_said() -> None:
    reports = {rank: replace(waiting(rank, 3, 9), stalled_s=1.0) for rank in range(3)}
    assert diagnose(reports, 3) is None
    assert diagnose({}, 3) is None


# --- any world --------------------------------------------------------------------------------------------

_HOWS = (
    {"phase": RankPhase.DATA},
    {"phase": RankPhase.DATA, "busy": True, "process": "R"},
    {"phase": RankPhase.FORWARD, "busy": True, "process": "R"},
    {"phase": RankPhase.FORWARD},
    {"phase": RankPhase.BACKWARD},
    {"phase": RankPhase.IDLE},
    {"phase": RankPhase.CHECKPOINT},
    {"phase": RankPhase.OPTIMIZER, "process": "D"},
    {"process": "T"},
    {"alive": False, "process": "Z"},
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, RankReport], int, int]:
    """A grid of data-parallel rows and columns; one rank stops coming, and all who need it wait, near and far."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    n = rows * columns
    guilty, how = draw(st.integers(0, n - 1)), draw(st.sampled_from(_HOWS))
    reports: dict[int, RankReport] = {}
    for rank in range(n):
        row, column = divmod(rank, columns)
        rows_group = (f"row{row}", columns, f"{row * columns}-{row * columns + columns - 1}")
        cols_group = (f"col{column}", rows, f"{column}-{column + (rows - 1) * columns}/{columns}")
        in_row = row == guilty // columns
        group = (rows_group if in_row else cols_group)[0]
        held = tuple(
            GroupView(g, s, m, 5 + (g == group and rank != guilty), 5) for g, s, m in (rows_group, cols_group)
        )
        calls = (call(5, group, done=True), *(() if rank == guilty else (call(6, group),)))
        phase = RankPhase.COMMUNICATE
        report = RankReport(rank, True, 3.2, LIMIT, phase, 3.2, 5, calls=calls, groups=held, process="S")
        reports[rank] = replace(report, **how) if rank == guilty else report  # type: ignore[arg-type]
    silent = draw(st.lists(st.integers(0, n - 1), max_size=2))
    left = {rank: report for rank, report in reports.items() if rank == guilty or rank not in silent}
    return left, n, guilty


@given(worlds())
def test_in_any_world_the_guilty_is_named_and_no_innocent_with_certainty(
    world: tuple[dict[int, RankReport], int, int],
) -> None:
    reports, n, guilty = world
    finding = diagnose(reports, n)
    if finding is None:  # it has ended, and nobody is left to miss it; or every rank that is left is stopped
        assert not reports[guilty].alive or len(reports) == 1
        return
    assert isinstance(finding, Finding)
    assert not finding.certain or blamed(finding) == [guilty]
    assert guilty in blamed(finding) or not finding.certain


@st.composite
def odd_ones(draw: st.DrawFn) -> tuple[dict[int, RankReport], int]:
    n = draw(st.integers(3, 9))
    odd = draw(st.integers(0, n - 1))
    other = draw(st.sampled_from([call(9, numel=1), call(9, op="barrier"), call(9, op="broadcast")]))
    reports = {rank: waiting(rank, n, 9) for rank in range(n)}
    reports[odd] = replace(reports[odd], calls=(other,))
    return reports, odd


@given(odd_ones())
def test_in_any_world_the_odd_one_out_is_named(world: tuple[dict[int, RankReport], int]) -> None:
    reports, odd = world
    finding = diagnose(reports, len(reports))
    assert isinstance(finding, Finding)
    assert (blamed(finding), finding.certain) == ([odd], True)


@given(
    st.lists(
        st.builds(
            RankReport,
            st.integers(0, 7),
            st.booleans(),
            st.floats(0, 10),
            st.sampled_from([None, 3.0]),
            st.sampled_from(RankPhase),
            st.just(1.0),
            st.integers(0, 3),
            calls=st.lists(
                st.builds(
                    call,
                    st.integers(1, 4),
                    st.sampled_from(["0", "a"]),
                    st.sampled_from(["all_reduce", "recv", "broadcast"]),
                    st.sampled_from([1, 2]),
                    st.booleans(),
                    st.integers(-1, 7),
                ),
                max_size=3,
            ).map(tuple),
            groups=st.lists(
                st.builds(
                    GroupView,
                    st.sampled_from(["0", "a"]),
                    st.integers(1, 8),
                    st.sampled_from(["", "0-7", "0-6/2", "x"]),
                    st.integers(0, 4),
                    st.integers(0, 4),
                ),
                max_size=2,
            ).map(tuple),
            alive=st.booleans(),
            process=st.sampled_from(["R", "S", "D", "T", "?"]),
            busy=st.booleans(),
        ),
        max_size=8,
    )
)
def test_no_world_however_strange_is_too_much(reports: list[RankReport]) -> None:
    finding = diagnose({report.rank: report for report in reports}, 8)
    if isinstance(finding, Finding):
        assert finding.blamed
        assert all(each.reason for each in finding.blamed)


def test_a_thousand_nodes_are_judged_at_once() -> None:
    """8,192 ranks, of which one never came: each rank is looked at a few times, whatever it waits for."""
    n = 8192
    reports = {rank: waiting(rank, n, 12) for rank in range(n)}
    reports[77] = absent(77, n, 11)
    finding = diagnose(reports, n)
    assert isinstance(finding, Finding)
    assert blamed(finding) == [77]
    assert "8191 ranks" in finding.blamed[0].reason or "ranks 0-76 and 78-8191" in finding.blamed[0].reason
    assert len(finding.evidence) <= 26
