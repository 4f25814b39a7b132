"""The wrapper together with other kinds of parallelism and with torch's transforms: right, or refused in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "combination_trials.all_of"


def test_tensor_parallelism_pipelines_and_parts_of_a_sequence(four_ranks: Ranks) -> None:
    four_ranks(TRIALS, "tensor_parallel", "pipelined", "context_parallel")


def test_layers_that_fsdp_shards(four_ranks: Ranks) -> None:
    four_ranks(TRIALS, "fsdp_beside", "fsdp_refused")


def test_functional_calls_parametrizations_tied_weights_and_adapters(four_ranks: Ranks) -> None:
    four_ranks(TRIALS, "functional", "parametrized", "tied", "lora")
