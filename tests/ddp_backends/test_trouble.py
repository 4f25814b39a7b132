"""Ranks that die, hang, disagree or leave: the others hear of it at once, by name, and nothing is left over."""

from __future__ import annotations

import operator
import os
import signal
import time
from pathlib import Path

import pytest
import trouble
from crew import SOON_S, Crew, Gone, Raised

KINDS = ["all-reduce", "average", "broadcast", "all-gather", "reduce-scatter", "reduce", "barrier"]


def named_memory(pids):
    """What of the memory that they share has a name: a killed process would leave it behind."""
    maps = (Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in pids)
    return {
        line for lines in maps for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")
    }


def wait_for(path, seconds=150):
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_death_inside_a_collective(kind, tmp_path):
    """Two wait in the collective when the third dies in it; each raises soon and names it."""
    with Crew(3) as ranks:
        assert not ranks.problems
        ranks.tell(trouble.collectives_until_killed, kind, str(tmp_path / "ready"), ranks=[1])
        ranks.tell(trouble.collectives_for_ever, kind, ranks=[0, 2])
        wait_for(tmp_path / "ready")
        assert not named_memory(ranks.pids)
        killed = time.monotonic()
        ranks.kill(1)
        answers = ranks.answers([0, 2])
        for at, said in answers:
            assert at - killed < SOON_S
            assert "rank 1 died" in said, said
        assert ranks.answers([1]) == [Gone(1)]


def test_death_of_the_first_rank_while_others_wait():
    """Also who joined long ago hears of it, though nobody else came."""
    with Crew(3) as ranks:
        ranks.tell(trouble.wait_for_somebody_who_does_not_come, "all-reduce", ranks=[1, 2])
        killed = time.monotonic()
        ranks.kill(0)
        for at, said in ranks.answers([1, 2]):
            assert at - killed < SOON_S
            assert "rank 0 died" in said


def test_death_under_torchs_ddp(tmp_path):
    with Crew(2) as ranks:
        ranks.tell(trouble.train_until_a_peer_is_gone, str(tmp_path / "ready"))
        wait_for(tmp_path / "ready")
        killed = time.monotonic()
        ranks.kill(1)
        ((at, said),) = ranks.answers([0])
        assert at - killed < SOON_S
        assert "rank 1 died" in said


def test_death_of_a_rank_whose_child_lives_on(tmp_path):
    with Crew(2) as ranks:
        ranks.tell(trouble.wait_for_somebody_who_does_not_come, "barrier", ranks=[0])
        ranks.tell(trouble.die_with_a_child, str(tmp_path / "child"), ranks=[1])
        ((_at, said),) = ranks.answers([0])
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        assert "rank 1 died" in said


def test_timeout_names_who_is_missing(crew):
    """Who comes when the others' time is up is missing to them as well, and is told so at once."""
    answers = {rank: answer for rank, answer in enumerate(crew.run(trouble.time_out_alone, 1)) if answer}
    first = min(came for came, _told, _said in answers.values())
    missing = [1, *(rank for rank, (came, _told, _said) in answers.items() if came > first + 0.9)]
    assert sorted(answers) == [rank for rank in range(crew.size) if rank != 1]
    for came, told, said in answers.values():
        assert told - first > 0.9
        assert told - came < 30
        assert any(f"rank {rank} has not joined all-reduce in time" in said for rank in missing), said


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_a_failed_operation_of_several_tensors_raises_also_in_its_future(pair, kind):
    answer, _ = pair.run(trouble.coalesced_alone, kind)
    assert answer == ([True, True], False, "DistBackendError")


def test_a_group_is_not_waited_for_longer_than_it_allows(pair):
    """The default group's limit is half an hour."""
    for rank, (after, said) in enumerate(pair.run(trouble.form_a_group_alone)):
        assert after < 30
        assert f"rank {1 - rank} has not joined the new group shm within 0.5 s" in said


def test_waiting_with_a_limit_breaks_nothing(pair):
    assert pair.run(trouble.wait_with_a_limit) == [True, True]


def test_abort_releases_who_waits(crew):
    answers = crew.run(trouble.abort_from_another_thread)
    aborted, _ = answers.pop(1)
    for at, said in answers:
        assert at - aborted < SOON_S
        assert "rank 1 aborted" in said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("size", "rank 1 all-reduce of 100000 x float32"),
        ("type", "rank 0 called all-reduce of 3 x float32, rank 1 all-reduce of 3 x int32"),
        ("kind", "rank 0 called all-reduce of 3 x float32, rank 1 barrier"),
        ("root", "different roots"),
        ("reduction", "different reductions"),
        (
            "tag",
            "rank 0 averaged bucket 0 of step 5 (wrapper and plan 000001), rank 1 averaged bucket 0 of step 6",
        ),
    ],
)
def test_disagreement_is_told_to_all(crew, how, words):
    for said in crew.run(trouble.disagree, how):
        assert words in said


def test_a_rank_that_left(crew):
    for rank, answer in enumerate(crew.run(trouble.leave_early)):
        if rank != 1:
            after, said = answer
            assert after < SOON_S or crew.size > 2
            assert "rank 1 has left" in said


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_later_use_of_a_broken_group_explains_itself(backend):
    with Crew(2, backend) as ranks:
        ranks.run(trouble.prepare_to_go_on)
        ranks.kill(1)
        ranks.tell(trouble.go_on, ranks=[0])
        assert ranks.answers([0]) == [[]]
        if backend == "shm":
            ranks.tell(trouble.past_a_broken_core, ranks=[0])
            assert ranks.answers([0]) == [[True, True]]


def test_a_forked_child_has_gradients_of_its_own(pair):
    """Written there, they stay as they were in the parent, which the other ranks read."""
    assert pair.run(trouble.write_gradients_in_a_child) == [(True, True)] * 2


def test_leaving_with_work_under_way(crew):
    said, *_others = crew.run(trouble.leave_with_work_under_way)
    assert len(said) == 3
    assert all("rank 0 aborted the process group" in each for each in said)


def test_waiting_in_a_callback(pair):
    assert pair.run(trouble.wait_in_a_callback) == [[4.0, 4.0, 4.0]] * 2


def test_a_signal_gets_through(pair):
    after, nothing = pair.run(trouble.signal_while_waiting)
    assert 0.2 < after < 60
    assert nothing is None


def test_forked_children(crew):
    for said in crew.run(trouble.use_in_a_child):
        assert "parent process" in said


def test_groups_leave_nothing_behind(crew):
    for before, after in crew.run(trouble.groups_come_and_go, 5):
        assert not any(map(operator.gt, after, before)), (before, after)


def test_nothing_after_destroy():
    with Crew(2) as ranks:
        assert ranks.run(trouble.nothing_after_destroy) == [([], 0)] * 2


def test_errors_are_of_torchs_kind():
    with Crew(2) as ranks:
        ranks.kill(1)
        ranks.tell(trouble.collective, "all-reduce", ranks=[0])
        (raised,) = ranks.answers([0])
        assert isinstance(raised, Raised)
        assert raised.kind == "DistBackendError"


@pytest.mark.parametrize("backend", ["shm", "hier"])
def test_no_member_leaves_before_all_are_connected(backend):
    """A rank that ended right after it had joined broke the connection that a slower one was still making."""
    with Crew(2, backend) as ranks:
        assert not ranks.problems
        assert ranks.run(trouble.form_while_one_is_held, 1) == [False, False]
