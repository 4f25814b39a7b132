"""No step waits for the device, and what the capture of a graph does not permit is not done, or refused in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "waiting_trials_there"


def test_the_map_of_used_parameters_is_waited_for_only_if_a_parameter_was_not_used(two_ranks: Ranks) -> None:
    assert two_ranks(f"{TRIALS}.looking_for_unused", False) == [[], []]
    assert two_ranks(f"{TRIALS}.looking_for_unused", True) == [["event.synchronize"]] * 2


def test_numerics_are_read_when_they_have_arrived(two_ranks: Ranks) -> None:
    for waited, text in two_ranks(f"{TRIALS}.checked"):
        assert waited == []
        assert "rank 1 has NaN" in text
        assert "in step 6 " in text


def test_numerics_of_a_module_on_two_devices(two_ranks: Ranks) -> None:
    one, other = two_ranks(f"{TRIALS}.checked_on_two_devices")
    assert one == other
    assert [bool(text) for text in one] == [False, False, False, True, False]
    assert "rank 1 has NaN in the gradient of first.weight" in one[3]


def test_a_captured_step_asks_the_device_nothing_and_keeps_its_memory(two_ranks: Ranks) -> None:
    for grown, reused in two_ranks(f"{TRIALS}.captured"):
        assert grown["collectives"] >= 2
        assert grown["host_syncs"] == grown["queries"] == 0
        assert reused == 0


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("early", "Run some steps before the capture"),
        ("find_unused", "find_unused_parameters=True"),
    ],
)
def test_what_a_replay_could_not_repeat_is_refused(two_ranks: Ranks, what: str, says: str) -> None:
    for text in two_ranks(f"{TRIALS}.refused", what):
        assert says in text
