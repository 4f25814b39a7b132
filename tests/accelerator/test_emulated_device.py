"""The emulated accelerator is strict: what a program may not do there gives wrong numbers or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks


@pytest.mark.parametrize(
    "trial",
    [
        "memory_is_out_of_reach",
        "early_reader",
        "waits_are_counted",
        "an_error_comes_later",
        "time_passes",
        "like_the_cpu",
        "random_numbers_come_again",
        "memory_has_an_end",
        "collectives_are_waited_for_by_streams",
        "collectives_give_what_gloo_gives",
    ],
)
def test_the_device(two_ranks: Ranks, trial: str) -> None:
    two_ranks(f"device_trials.{trial}")


def test_memory_is_reused_unless_a_stream_is_recorded(two_ranks: Ranks) -> None:
    assert two_ranks("device_trials.freed_memory", True) == [True, True]
    assert two_ranks("device_trials.freed_memory", False) == [False, False]
