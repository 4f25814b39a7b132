"""Commits of a state on a device: the training does not wait, nobody overtakes a snapshot, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from ranks import Ranks

TRIALS = "commit_trials_there"


def test_a_commit_returns_while_the_device_stands_still(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(f"{TRIALS}.waits", str(tmp_path)) == [([], 5, 6)] * 2


def test_a_commit_gives_few_kernels_and_one_copy_to_the_device(two_ranks: Ranks, tmp_path: Path) -> None:
    for launched in two_ranks(f"{TRIALS}.launches", str(tmp_path)):
        assert launched["copies"] == 1
        assert launched["kernels"] <= 3  # one for each type of tensors
        assert launched["host_syncs"] == launched["unforeseen_waits"] == 0


def test_generators_are_read_while_the_device_stands_still(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(f"{TRIALS}.generators_wait", str(tmp_path)) == [[], []]


@pytest.mark.parametrize("who", ["foreach", "fused", "one by one", "graph", "by hand", "stream"])
def test_nobody_overtakes_a_snapshot(two_ranks: Ranks, tmp_path: Path, who: str) -> None:
    assert two_ranks(f"{TRIALS}.overtaken", str(tmp_path), who) == [[True] * 8] * 2


def test_a_state_on_two_devices(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(f"{TRIALS}.on_two_devices", str(tmp_path)) == [True, True]


def test_a_training_goes_on_from_an_overlapped_commit_with_the_same_bits(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    (one, drawn), (other, drawn_there) = two_ranks(f"{TRIALS}.resumed", str(tmp_path))
    assert one
    assert other
    assert drawn != drawn_there


def test_what_waits_for_a_commit_that_is_under_way(two_ranks: Ranks, tmp_path: Path) -> None:
    wanted = {"commit": -1, "flush": 0, "checkpoint": 0, "capture": 0, "resume": 0, "kept": 3}
    assert two_ranks(f"{TRIALS}.waiting_calls", str(tmp_path)) == [wanted, wanted]


def test_a_rank_that_stores_no_tensors_is_not_ahead_of_its_device(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(f"{TRIALS}.without_tensors", str(tmp_path)) == [0, 0]


def test_a_commit_that_fails_on_its_way_is_told_at_the_next_one(two_ranks: Ranks, tmp_path: Path) -> None:
    says = {
        "device": "could not be copied from the device",
        "garbage": "NCCL reports an error. The state may be garbage",
        "generation": "this process continued in another generation",
    }
    for failures in two_ranks(f"{TRIALS}.failures", str(tmp_path)):
        for what, (first, second, kept, third, newest) in failures.items():
            assert first == third == "", what
            assert says[what] in second
            assert "CommitError" in second
            assert "still valid" in second
            assert kept == -1
            assert newest == 1


@pytest.mark.parametrize(
    ("what", "says", "overlapped"),
    [
        ("room", "emu:0 has 1 MiB free, and 51 MiB are needed", False),
        ("memory", "commit() waits for the device", False),
        ("pins", "cannot be pinned: cudaHostRegister: 304", True),
        ("wish", "", False),
    ],
)
def test_without_memory_without_pins_or_if_not_wanted(
    two_ranks: Ranks, tmp_path: Path, what: str, says: str, overlapped: bool
) -> None:
    for right, lines, is_overlapped in two_ranks(f"{TRIALS}.without", str(tmp_path), what):
        assert right
        assert len(lines) == bool(says)
        assert says in "".join(lines)
        assert is_overlapped == overlapped


def test_a_commit_inside_a_capture_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for text in two_ranks(f"{TRIALS}.in_a_capture", str(tmp_path)):
        assert "Call it after the replay" in text
