"""A sampler whose position in the epoch counts samples that were trained on, not samples that were prefetched.

DataLoader workers prefetch batches that the script has not trained on yet. So iterating does not move the position.
`advance` does, and every commit calls it. After a restart the epoch continues after the last committed sample, in a
world of any size. `ddp.elastic.sampler` describes the order, and the last round of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp.telemetry.coded import WrongValue

# The samples of an epoch that remain for a rank, for any earlier world size (pure functions).
#
# An epoch is one order of all samples. It depends only on the seed and the number of the epoch. It is consumed from the
# front, and `consumed` is the position. With W ranks, rank r takes the positions consumed + r, consumed + r + W, and so
# on. So after k samples on every rank, exactly the next k * W samples of the order are consumed, for any batch size. A
# world of another size continues at this position: no sample is skipped, and none is repeated.
#
# A round is one sample per rank. The number of samples may not be a multiple of W: then the last round is incomplete.
# All ranks must run the same number of steps. By default the round is filled with samples from the start of the epoch,
# so fewer than W samples are repeated. With `drop_last` the round is omitted, so fewer than W samples are skipped.

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


class ElasticSampler(Sampler[int]):
    """Use it instead of torch's DistributedSampler, with the same arguments.

    for epoch in sampler.epochs(10):
        for inputs, labels in loader:
            ...
            state.commit(samples=len(labels))  # of this rank
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        size = dataset if isinstance(dataset, int) else len(dataset)
        self._is_placed = num_replicas is not None or rank is not None  # by the script
        there = dist.is_available() and dist.is_initialized()
        self.num_replicas = (
            num_replicas if num_replicas is not None else dist.get_world_size() if there else 1
        )
        self.rank = rank if rank is not None else dist.get_rank() if there else 0
        if not 0 <= self.rank < self.num_replicas:
            raise WrongValue(
                f"invalid rank={self.rank} with num_replicas={self.num_replicas}. Use 0 to {self.num_replicas - 1}"
            )
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._progress = Progress(size)

    @property
    def epoch(self) -> int:
        return self._progress.epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that all ranks together have trained on."""
        return self._progress.consumed

    def __len__(self) -> int:
        """The number of samples that remain for this rank in this epoch."""
        return rounds_left(self._progress, self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[int]:
        places = positions(self._progress, self.rank, self.num_replicas, self.drop_last)
        if not self.shuffle:
            return iter(places)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._progress.size, generator=generator)
        return iter(order[torch.tensor(places, dtype=torch.int64)].tolist())

    def move(self, rank: int, num_replicas: int) -> None:
        """Take another place, in a world that may have another size. A place that the script has chosen stays."""
        if not self._is_placed:
            self.rank, self.num_replicas = rank, num_replicas

    def advance(self, samples: int) -> None:
        """Move the position: this rank, and every other rank, has trained on this number of samples."""
        self._progress = advance(self._progress, samples, self.num_replicas)

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Yield the current epoch and those after it."""
        while self.epoch < n_epochs:
            yield self.epoch
            self._progress = next_epoch(self._progress)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. If it is the current one, keep the position, so that a resumed epoch continues."""
        if epoch != self.epoch:
            self._progress = Progress(self._progress.size, epoch)

    def state_dict(self) -> dict[str, Any]:
        place = self._progress
        return {"size": place.size, "epoch": place.epoch, "consumed": place.consumed, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["size"] != self._progress.size:
            raise WrongValue(
                f"cannot resume the sampler: the commit has a dataset of {state['size']} samples, but this dataset has "
                f"{self._progress.size}. The saved position is not valid for it. Use the same dataset, or use an "
                "empty folder to start without a commit"
            )
        self.seed = state["seed"]
        self._progress = Progress(state["size"], state["epoch"], state["consumed"])
