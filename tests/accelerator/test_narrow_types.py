"""GradScaler, half precision and mixed types on an accelerator: as with torch's class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "scaler_trials_there"
VIEW = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("given", [{}, {"bucket_cap_mb": 0.005, **VIEW}])
def test_all_ranks_leave_out_the_step_in_which_one_overflows(two_ranks: Ranks, given: dict[str, Any]) -> None:
    one, other = two_ranks(f"{TRIALS}.an_overflow", given)
    assert one == other
    scales, skipped = one
    assert skipped == [False, False, True, False, False]
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]


@pytest.mark.parametrize("given", [{}, VIEW, {"bucket_cap_mb": 0.0001}])
def test_one_module_of_many_types(two_ranks: Ranks, given: dict[str, Any]) -> None:
    two_ranks(f"{TRIALS}.like_torchs_mixed", given)
