"""A sampler whose position in the epoch counts samples that were trained on, not samples that were prefetched.

DataLoader workers prefetch batches that the script has not trained on yet. So iterating does not move the position.
`advance` does, and every commit calls it. After a restart the epoch continues after the last committed sample, in a
world of any size. `ddp.elastic.sample_order` describes the order, and the last round of an epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp.elastic import sample_order
from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


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
        places = sample_order.positions(self._progress, self.rank, self.num_replicas, self.drop_last)
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
