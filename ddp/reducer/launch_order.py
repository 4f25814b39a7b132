"""Decide which bucket to launch next when gradients become ready, in the order of the plan.

All ranks must launch the same collectives in the same order. Gradients may become ready in a different order on each
rank. Bucket i + 1 is therefore never launched before bucket i.

Gradients of several devices become ready on several threads. A thread that wants to launch claims the next bucket. As
long as one thread has a claim, no other thread gets one. The owner of the claim launches the bucket, releases the
claim, and claims again. A thread that gets no claim leaves its bucket to the owner.

Every step costs the same for any number of buckets. The caller holds a lock during each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from collections.abc import Sequence


class LaunchOrder:
    """Which buckets are full, which have been launched, and whether a launch is in progress."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` holds the number of gradients of each bucket."""
        if any(size < 1 for size in sizes):
            raise WrongValue("internal error: a bucket must have at least one gradient")
        self.pending = list(sizes)  # how many gradients each bucket still waits for
        self.claimed = 0  # buckets 0..claimed-1 have been launched, or the last of them is being launched
        self.is_launching = False

    @property
    def complete(self) -> bool:
        return self.claimed == len(self.pending) and not self.is_launching

    @property
    def may_launch(self) -> bool:
        """Whether the next bucket is full, and nobody has claimed it."""
        return self.claimed < len(self.pending) and not self.pending[self.claimed]

    def arrived(self, bucket: int, count: int = 1) -> None:
        """Record `count` more ready gradients of a bucket."""
        left = self.pending[bucket] - count
        if count < 1 or left < 0:
            raise WrongValue(
                f"internal error: bucket {bucket} waits for {self.pending[bucket]} gradients, but {count} arrived"
            )
        self.pending[bucket] = left

    def claim(self) -> int | None:
        """Return the bucket that the caller must launch now, or None."""
        bucket = self.claimed
        if self.is_launching or bucket == len(self.pending) or self.pending[bucket]:
            return None
        self.claimed, self.is_launching = bucket + 1, True
        return bucket

    def release(self) -> None:
        """End the launch of the claimed bucket, whether it succeeded or not. It is not launched again."""
        if not self.is_launching:
            raise WrongValue("internal error: no bucket is being launched")
        self.is_launching = False
