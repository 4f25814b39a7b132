"""The samples of an epoch that remain for a rank, for any earlier world size (pure functions).

An epoch is one order of all samples. It depends only on the seed and the number of the epoch. It is consumed from the
front, and `consumed` is the position. With W ranks, rank r takes the positions consumed + r, consumed + r + W, and so
on. So after k samples on every rank, exactly the next k * W samples of the order are consumed, for any batch size. A
world of another size continues at this position: no sample is skipped, and none is repeated.

A round is one sample per rank. The number of samples may not be a multiple of W: then the last round is incomplete. All
ranks must run the same number of steps. By default the round is filled with samples from the start of the epoch, so
fewer than W samples are repeated. With `drop_last` the round is omitted, so fewer than W samples are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddp.telemetry.coded import WrongValue

# --- the order of samples --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of all ranks together; it is the same on each rank."""

    size: int
    epoch: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.epoch < 0 or not 0 <= self.consumed <= self.size:
            raise WrongValue(
                f"invalid position {self.consumed} in epoch {self.epoch}: the dataset has {self.size} samples. Use the "
                "dataset of the commit"
            )


def rounds_left(progress: Progress, world_size: int, drop_last: bool) -> int:
    """The number of samples that remain for each rank; it is the same on every rank."""
    left = progress.size - progress.consumed
    return left // world_size if drop_last else -(-left // world_size)


def positions(progress: Progress, rank: int, world_size: int, drop_last: bool) -> list[int]:
    """The positions of a rank's samples in the order of the epoch."""
    rounds = rounds_left(progress, world_size, drop_last)
    first = progress.consumed + rank
    return [(first + step * world_size) % progress.size for step in range(rounds)]


def advance(progress: Progress, samples: int, world_size: int) -> Progress:
    """Return the position after this number of samples on every rank."""
    if samples < 0:
        raise WrongValue(
            f"invalid samples={samples}: negative. Use the number of samples that this rank trained on"
        )
    return replace(progress, consumed=min(progress.size, progress.consumed + samples * world_size))


def next_epoch(progress: Progress) -> Progress:
    return Progress(progress.size, progress.epoch + 1)


# --- seeds -----------------------------------------------------------------------------------------
#
# Seeds that are computed, not drawn: equal runs get equal seeds, in a process that starts later too.
#
# `splitmix` is a permutation of the 64-bit numbers that separates neighbours (splitmix64 by Steele, Lea and Flood).

_ALL = 2**64 - 1


def splitmix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & _ALL
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _ALL
    return number ^ number >> 31


def mixed(*numbers: int) -> int:
    """A number of 64 bits that depends on each of these and on their order."""
    found = len(numbers)
    for number in numbers:
        found = splitmix(found ^ splitmix(number & _ALL))
    return found


def seed_of_new_rank(seed: int, commit: int, rank: int) -> int:
    """The seed of a rank without saved generators.

    `seed`: that of the lowest rank that has saved its generators in this commit.
    """
    return mixed(seed, commit, rank)
