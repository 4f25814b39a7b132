"""A sampler whose place in the epoch moves with the training, not with the loader that runs ahead of it.

DataLoader workers fetch batches that nobody has trained on yet. So iterating does not count: `advance`,
which every commit calls, does. After a restart the epoch goes on behind the last committed sample, in a
world of whatever size; see `ddp.elastic.sample_order` for the order and for what happens in an epoch's last round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp.elastic import sample_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ElasticSampler(Sampler[int]):
    """In place of torch's DistributedSampler, with the same arguments.

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
        there = dist.is_available() and dist.is_initialized()
        self.num_replicas = (
            num_replicas if num_replicas is not None else dist.get_world_size() if there else 1
        )
        self.rank = rank if rank is not None else dist.get_rank() if there else 0
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas} replicas")
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
        """What this rank has still to take in this epoch."""
        return sample_order.rounds_left(self._progress, self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[int]:
        places = sample_order.positions(self._progress, self.rank, self.num_replicas, self.drop_last)
        if not self.shuffle:
            return iter(places)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._progress.size, generator=generator)
        return iter(order[torch.tensor(places, dtype=torch.int64)].tolist())

    def advance(self, samples: int) -> None:
        """So many samples have been trained on, on this rank and on every other."""
        self._progress = sample_order.advanced(self._progress, samples, self.num_replicas)

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """The epoch that is under way, and those after it."""
        while self.epoch < n_epochs:
            yield self.epoch
            self._progress = sample_order.next_epoch(self._progress)

    def set_epoch(self, epoch: int) -> None:
        """From its beginning, unless it is the one under way: then nothing changes, as after a resume."""
        if epoch != self.epoch:
            self._progress = sample_order.Progress(self._progress.size, epoch)

    def state_dict(self) -> dict[str, Any]:
        place = self._progress
        return {"size": place.size, "epoch": place.epoch, "consumed": place.consumed, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["size"] != self._progress.size:
            raise ValueError(
                f"the commit is of a dataset of {state['size']} samples, this one has {self._progress.size}: "
                "where the epoch stood has no meaning in it. Start from an empty folder, or train on the same data"
            )
        self.seed = state["seed"]
        self._progress = sample_order.Progress(state["size"], state["epoch"], state["consumed"])
