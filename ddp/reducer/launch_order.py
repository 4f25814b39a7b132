"""Decide which buckets to launch when gradients become ready, in the order of the plan.

All ranks must launch the same collectives in the same order. Gradients may become ready in a different order on each
rank. Bucket i + 1 is therefore never launched before bucket i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Readiness:
    """Which buckets are full, and which have been launched."""

    pending: tuple[int, ...]  # how many gradients each bucket still waits for
    launched: int = 0  # buckets 0..launched-1 have been launched

    @property
    def complete(self) -> bool:
        return self.launched == len(self.pending)


def begin(sizes: Sequence[int]) -> Readiness:
    """Return the initial state. `sizes` holds the number of gradients of each bucket."""
    if any(size < 1 for size in sizes):
        raise ValueError("internal error: a bucket must have at least one gradient")
    return Readiness(tuple(sizes))


def arrived(state: Readiness, bucket: int, count: int = 1) -> tuple[Readiness, range]:
    """Record `count` more ready gradients of a bucket -> the new state and the buckets to launch now, in order."""
    left = state.pending[bucket] - count
    if count < 1 or left < 0:
        raise ValueError(
            f"internal error: bucket {bucket} waits for {state.pending[bucket]} gradients, but {count} arrived"
        )
    pending = (*state.pending[:bucket], left, *state.pending[bucket + 1 :])
    end = state.launched
    while end < len(pending) and pending[end] == 0:
        end += 1
    return Readiness(pending, end), range(state.launched, end)
