"""Our DistributedDataParallel on an accelerator: the same training as with torch's, and nobody reads too early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "averaging_trials_there"


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("layers", {}),
        ("layers", {"bucket_cap_mb": 0.005}),
        ("layers", {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True}),
        ("layers", {"static_graph": True}),
        ("layers", {"broadcast_buffers": False}),
        ("branches", {"find_unused_parameters": True}),
        (
            "branches",
            {"find_unused_parameters": True, "bucket_cap_mb": 0.002, "gradient_as_bucket_view": True},
        ),
    ],
)
def test_the_same_training_as_with_torchs(two_ranks: Ranks, model: str, given: dict[str, Any]) -> None:
    two_ranks(f"{TRIALS}.like_torchs", model, given)


@pytest.mark.parametrize("given", [{}, {"bucket_cap_mb": 0.005}, {"gradient_as_bucket_view": True}])
def test_a_step_does_not_wait(two_ranks: Ranks, given: dict[str, Any]) -> None:
    two_ranks(f"{TRIALS}.without_waiting", given)


def test_a_hook_that_reads_too_early_is_seen(two_ranks: Ranks) -> None:
    assert two_ranks(f"{TRIALS}.right_with", "proper") == [True, True]
    assert two_ranks(f"{TRIALS}.right_with", "hasty") == [False, False]
