"""Times on an accelerator are those of the device, and nobody waits for them in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "clock_trials_there"
SLOW_MS = 20


def test_a_moment_passes_when_the_device_does(two_ranks: Ranks) -> None:
    for before, after, took_ms in two_ranks(f"{TRIALS}.moments"):
        assert (before, after) == (False, True)
        assert took_ms >= SLOW_MS


def test_the_logging_data_has_times_of_the_device(two_ranks: Ranks) -> None:
    for waited, told in two_ranks(f"{TRIALS}.logged"):
        assert waited == []
        assert told["backward_comm_time"] >= 5 * SLOW_MS
        assert told["backward_compute_time"] < told["backward_comm_time"]
