"""Optimizers of all kinds, recomputed activations, and the load test of pre-flight, on an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "optimizer_trials_there"


@pytest.mark.parametrize("trial", ["in_the_backward", "load_test"])
def test_alone(two_ranks: Ranks, trial: str) -> None:
    two_ranks(f"{TRIALS}.{trial}")


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_averaging_at_intervals(two_ranks: Ranks, kind: str) -> None:
    two_ranks(f"{TRIALS}.averaged", kind)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(two_ranks: Ranks, reentrant: bool) -> None:
    two_ranks(f"{TRIALS}.checkpointed", reentrant)
