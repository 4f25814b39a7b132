"""The judge is judged: what is read off the terminals, and what counts as right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fault_case import Case, Kind
from fault_play import Played
from verdicts import Verdict, verdict_of

_AGAIN = "; restarting with the same nodes (restart 1 of 1)"


@pytest.mark.parametrize(
    ("line", "blamed", "certain"),
    [
        ("rank 1 on vm: exit code 3", (1,), True),
        ("rank 3 on vm#1: has been stopped by a signal for 3.3 s; ranks 0-2 have waited for it", (3,), True),
        (
            "rank 1 on vm: has been stopped by a signal; ranks 0 and 4 have waited for it; the same for ranks 2 and 3",
            (1, 2, 3),
            True,
        ),
        (
            "hang; cause uncertain: ranks 0-2 and 5: deadlock: ranks 0-2 and 5 wait for each other",
            (0, 1, 2, 5),
            False,
        ),
        ("hang; cause uncertain: rank 1: has made no progress", (1,), False),
        ("hang; no rank is the cause: all ranks have entered all_reduce #7", (), False),
        ("user-exception; the collectives of the ranks do not match: gloo: invalid size", (), False),
        (
            "user-exception; the ranks called different collectives: rank 0 entered barrier #7; rank 1 entered",
            (),
            False,
        ),
        ("node vm#1 was lost: no heartbeat for 4 s", (), True),
    ],
)
def test_who_is_blamed(line: str, blamed: tuple[int, ...], certain: bool) -> None:
    found = verdict_of([f"[vm:0] noise\nddp-launch: {line}{_AGAIN}\n"])
    assert found == Verdict(line, blamed, certain)


def test_mere_consequences_of_the_first_moment_do_not_count() -> None:
    lost = f"ddp-launch: rank 0 on vm lost the connection to its peers{_AGAIN}"
    text = f"{lost}\nddp-launch: rank 1 on vm: exit code 3{_AGAIN}\n"
    assert verdict_of([text]) == Verdict("rank 1 on vm: exit code 3", (1,))
    alone = verdict_of([text.splitlines()[0]])
    assert alone is not None
    assert alone.blamed == ()


def test_nothing_said_is_no_verdict() -> None:
    assert verdict_of(["", "[vm:0] ddp-launch: of a rank; restarting with words of its own\n"]) is None


def test_nodes_that_disagree_are_noticed() -> None:
    lines = [f"ddp-launch: rank {rank} on vm: exit code 3{_AGAIN}" for rank in (0, 1)]
    with pytest.raises(AssertionError, match="different things"):
        verdict_of(lines)


def test_what_is_right_and_what_is_not() -> None:
    case = Case("stopped", "SIGSTOP", "stopped by a signal")
    right = Played(case, Verdict("rank 1 on vm: has been stopped by a signal", (1,)), took_s=3.5, step_s=4.0)
    assert right.is_right
    assert right.is_in_time
    assert not right.blames_an_innocent
    other = replace(right, verdict=Verdict("rank 0 on vm: is stopped by a signal", (0,)))
    assert not other.is_right
    assert other.blames_an_innocent
    assert not replace(right, verdict=Verdict("rank 1 on vm: exit code 3", (1,))).is_right
    assert not replace(
        right, verdict=Verdict("rank 1 on vm: has been stopped by a signal", (1,), False)
    ).is_right
    assert not replace(right, took_s=case.may_take_s).is_in_time
    assert not replace(right, verdict=None).is_right
    innocent = replace(right, case=replace(case, kind=Kind.INNOCENT, blamed=()))
    assert not innocent.is_right
    assert innocent.blames_an_innocent
    assert replace(innocent, verdict=None).is_right
