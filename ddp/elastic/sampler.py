"""A sampler whose position in the epoch counts samples that were trained on, not samples that were prefetched.

DataLoader workers prefetch batches that the script has not trained on yet. So iterating does not move the position.
`advance` does, and every commit calls it. After a restart the epoch continues after the last committed sample, in a
world of any size. `ddp.elastic.sample_order` describes the order, and the last round of an epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp.elastic import sample_order
from ddp.telemetry.coded import WrongType, WrongValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized

    from ddp.elastic.team import Team


class CarriedRanks(ABC):
    """Ranks whose number does not follow that of the processes: each process carries some (`elastic.LogicalWorld`).

    A State that holds them lets them restore the generators.
    """

    size: int

    @property
    @abstractmethod
    def mine(self) -> range:
        """The ranks that this process carries."""

    @abstractmethod
    def move(self, team: Team) -> None:
        """Take the place of this process in a new generation."""


class ElasticSampler(Sampler[int]):
    """Use it instead of torch's DistributedSampler, with the same arguments.

    for epoch in sampler.epochs(10):
        for inputs, labels in loader:
            ...
            state.commit(samples=len(labels))  # of this rank

    With a `logical_world` the samples belong to its ranks, not to processes. Use `batches`.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        logical_world: CarriedRanks | None = None,
    ) -> None:
        if logical_world is not None and (num_replicas, rank) != (None, None):
            raise WrongValue("num_replicas and rank have no effect with a logical_world. Remove them")
        self._logical_world = logical_world
        if logical_world is not None:
            num_replicas, rank = logical_world.size, logical_world.mine[0]
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
        self._progress = sample_order.Progress(size)

    @property
    def epoch(self) -> int:
        return self._progress.epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that all ranks together have trained on."""
        return self._progress.consumed

    def __len__(self) -> int:
        """The number of samples that remain for this rank in this epoch."""
        return sample_order.rounds_left(self._progress, self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[int]:
        if self._logical_world is not None:
            raise WrongType(
                "with a logical_world the sampler makes batches, because a process may have several logical ranks. "
                "Use DataLoader(dataset, batch_sampler=sampler.batches(batch_size))"
            )
        return iter(self._samples([self.rank])[0])

    def batches(self, batch_size: int, drop_last: bool = False) -> Batches:
        """Return a batch sampler. In each step it has one batch for each logical rank of this process, in their order.

        `drop_last`: omit the last batch of a logical rank if it is incomplete.
        """
        if batch_size < 1:
            raise WrongValue(f"invalid batch_size={batch_size}. Use 1 or more")
        return Batches(self, batch_size, drop_last)

    @property
    def _ranks(self) -> Sequence[int]:
        return [self.rank] if self._logical_world is None else self._logical_world.mine

    def _samples(self, ranks: Sequence[int]) -> list[list[int]]:
        """The remaining samples of each of these ranks."""
        everything = [
            sample_order.positions(self._progress, rank, self.num_replicas, self.drop_last) for rank in ranks
        ]
        if not self.shuffle:
            return everything
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._progress.size, generator=generator)
        return [order[torch.tensor(places, dtype=torch.int64)].tolist() for places in everything]

    def move(self, rank: int, num_replicas: int) -> None:
        """Take another place, in a world that may have another size. A place that the script has chosen stays."""
        if not self._is_placed:
            self.rank, self.num_replicas = rank, num_replicas

    def advance(self, samples: int) -> None:
        """Move the position: this rank, and every other rank, has trained on this number of samples.

        With a logical world: this logical rank, and every other one.
        """
        self._progress = sample_order.advance(self._progress, samples, self.num_replicas)

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Yield the current epoch and those after it."""
        while self.epoch < n_epochs:
            yield self.epoch
            self._progress = sample_order.next_epoch(self._progress)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. If it is the current one, keep the position, so that a resumed epoch continues."""
        if epoch != self.epoch:
            self._progress = sample_order.Progress(self._progress.size, epoch)

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
        self._progress = sample_order.Progress(state["size"], state["epoch"], state["consumed"])


class Batches(Sampler[list[int]]):
    """The batches of this process, for DataLoader(batch_sampler=...)."""

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool) -> None:
        self._sampler, self._batch_size, self._drop_last = sampler, batch_size, drop_last

    def __len__(self) -> int:
        return len(self._starts()) * len(self._sampler._ranks)

    def __iter__(self) -> Iterator[list[int]]:
        samples = self._sampler._samples(self._sampler._ranks)
        for start in self._starts():
            for each in samples:
                yield each[start : start + self._batch_size]

    def _starts(self) -> range:
        count = len(self._sampler)
        end = count - count % self._batch_size if self._drop_last else count
        return range(0, end, self._batch_size)
