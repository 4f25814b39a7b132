"""Everything that our DistributedDataParallel can do, on an accelerator whose kernels are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "option_trials_there"


@pytest.mark.parametrize(
    "hook",
    [
        "torchs_all_reduce",
        "torchs_fp16",
        "torchs_power",
    ],
)
def test_hooks_give_what_they_give_with_torchs_class(two_ranks: Ranks, hook: str) -> None:
    two_ranks(f"{TRIALS}.with_hook", hook)


@pytest.mark.parametrize("given", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("trial", ["accumulated", "joined"])
def test_no_sync_and_join(two_ranks: Ranks, trial: str, given: dict[str, Any]) -> None:
    two_ranks(f"{TRIALS}.{trial}", given)


@pytest.mark.parametrize("given", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0005}])
def test_mixed_precision(two_ranks: Ranks, given: dict[str, Any]) -> None:
    two_ranks(f"{TRIALS}.mixed", given)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["ours", "torchs"])
def test_mixed_precision_after_a_heal(two_ranks: Ranks, kind: str, where: str) -> None:
    two_ranks(f"{TRIALS}.healed", kind, where)


def test_autocast_and_a_scaler(two_ranks: Ranks) -> None:
    two_ranks(f"{TRIALS}.under_autocast")


def test_numerics(two_ranks: Ranks) -> None:
    two_ranks(f"{TRIALS}.checked")


@pytest.mark.parametrize("given", [{}, {"bucket_cap_mb": 0.002}, {"gradient_as_bucket_view": True}])
def test_a_module_on_two_devices(two_ranks: Ranks, given: dict[str, Any]) -> None:
    two_ranks(f"{TRIALS}.on_two", "emu:0", "emu:1", given)


def test_a_module_on_two_types_of_device_is_refused(two_ranks: Ranks) -> None:
    two_ranks(f"{TRIALS}.on_two_types")
