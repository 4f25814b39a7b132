"""Which samples of an epoch a rank still has to see, whatever worlds have seen the others.

An epoch is one order of all samples, made from the seed and the epoch's number alone. It is consumed from
the front: `consumed` says how far. With W ranks, rank r takes positions consumed + r, consumed + r + W, and
so on, so that after k samples on every rank exactly the next k * W of the order are consumed, whatever the
batch size. A world of another size goes on at that very position: nothing is left out, nothing comes twice.

The last round of an epoch is the one place where counts may not fit. Ranks must take part in the same
number of steps, so either the round is filled up with samples from the epoch's beginning (fewer than W of
them are seen twice), or it is left out with `drop_last` (fewer than W of them are not seen).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Progress:
    """Of all ranks together. The same on each of them."""

    size: int
    epoch: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.epoch < 0 or not 0 <= self.consumed <= self.size:
            raise ValueError(f"{self.consumed} samples of {self.size} in epoch {self.epoch}: not a position")


def rounds_left(progress: Progress, world_size: int, drop_last: bool) -> int:
    """How many samples each rank has still to take: the same number on every rank."""
    left = progress.size - progress.consumed
    return left // world_size if drop_last else -(-left // world_size)


def positions(progress: Progress, rank: int, world_size: int, drop_last: bool) -> list[int]:
    """Places in the epoch's order."""
    rounds = rounds_left(progress, world_size, drop_last)
    first = progress.consumed + rank
    return [(first + step * world_size) % progress.size for step in range(rounds)]


def advanced(progress: Progress, samples: int, world_size: int) -> Progress:
    """After so many samples on every rank."""
    if samples < 0:
        raise ValueError(f"{samples} samples: a number of samples is not negative")
    return replace(progress, consumed=min(progress.size, progress.consumed + samples * world_size))


def next_epoch(progress: Progress) -> Progress:
    return Progress(progress.size, progress.epoch + 1)
