"""What the reducer does on an accelerator to need few calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranks import Ranks

TRIALS = "cost_trials_there"


def test_a_backend_that_averages_saves_one_kernel_per_bucket(two_ranks: Ranks) -> None:
    for buckets, saved in two_ranks(f"{TRIALS}.the_backend_averages"):
        assert buckets > 1
        assert saved == buckets


def test_a_bucket_is_one_chunk(two_ranks: Ranks) -> None:
    for chunks, buckets in two_ranks(f"{TRIALS}.one_chunk_per_bucket"):
        assert chunks == buckets


def test_a_launch_follows_copies_on_another_stream(two_ranks: Ranks) -> None:
    two_ranks(f"{TRIALS}.a_launch_follows_the_copies")
