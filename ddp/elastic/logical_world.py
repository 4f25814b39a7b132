"""`LogicalWorld`: a training that belongs to N logical ranks, whatever number of processes carries them.

Each process runs its logical ranks one after the other. In each step a logical rank has

- its own samples (`ElasticSampler.batches`),
- its own random numbers: all generators are seeded from the seed of the job, the step and the logical rank. So nothing
  has to be kept, sent, or lost: any process can go on with any logical rank;
- its own gradients, which are summed in one order (`ddp.elastic.logical_ranks`), and divided by N at the end;
- the buffers that logical rank 0 had after the previous step, as with DDP, where rank 0 broadcasts its buffers.

Outside of these steps the processes have the generators of the job: those of process 0 when the training began.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import generators, logical_ranks, seeds
from ddp.elastic.logical_model import attach
from ddp.elastic.team import Team
from ddp.telemetry.coded import WrongUse, WrongValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from ddp.elastic.logical_model import LogicalModel

VARIABLE = "DDP_LOGICAL_WORLD"
_COMPUTE, _FETCH = 0, 1


class LogicalWorld:
    """N logical ranks. Without a number: DDP_LOGICAL_WORLD, which `ddp-launch --logical-world N` sets.

    Put it into the State: State(world=world, model=model, ...). `threads`: threads of torch in each process, because
    results on CPUs depend on it; None leaves torch's setting alone.
    """

    def __init__(
        self, size: int | None = None, *, threads: int | None = 1, group: ProcessGroup | None = None
    ) -> None:
        self._team = Team(group)
        self.size = _size_from(os.environ.get(VARIABLE), self._team.size) if size is None else size
        logical_ranks.check_size(self.size, self._team.size)
        self.threads = threads
        if threads is not None:
            torch.set_num_threads(threads)
        self._models: weakref.WeakKeyDictionary[Any, LogicalModel] = weakref.WeakKeyDictionary()
        self._seed: int | None = None
        self._steps = 0
        self._open: _Step | None = None

    @property
    def mine(self) -> range:
        """The logical ranks of this process."""
        return logical_ranks.block(self.size, self._team.rank, self._team.size)

    def move(self, team: Team) -> None:
        """Take the place of this process in a new generation: its rank, and the number of processes, may be others."""
        logical_ranks.check_size(self.size, team.size)
        if self._open is not None:
            self._open.close()
            self._open = None
        self._team = team
        self._models.clear()  # the sums of their process groups may have another order

    # --- steps ---------------------------------------------------------------------------------------

    def ranks(self, *models: torch.nn.Module) -> Iterator[int]:
        """Run the body of the loop for each logical rank of this process, with its generators.

        In the body, run forward and backward of each model. After the loop `.grad` holds the averages over all logical
        ranks. Collective: all processes must run the loop to its end.
        """
        return (rank for rank, _nothing in self._step(models, lambda _rank: None))

    def steps(self, loader: Iterable[Any], *models: torch.nn.Module) -> Iterator[Iterator[Any]]:
        """Yield the steps of an epoch; each yields one batch for each logical rank of this process.

        `loader`: a DataLoader with `batch_sampler=sampler.batches(...)`. Batches are fetched with generators of the
        logical rank, so random transformations belong to it (in this process, not in workers of the loader).
        """
        self._begin()
        assert self._seed is not None
        with _other_generators(seeds.mixed(self._seed, self._steps)):
            batches = iter(loader)  # draws a seed for its workers; after a restart it would draw once more
        nothing = object()
        while (first := self._fetch(batches, self.mine[0], nothing)) is not nothing:
            before = self._steps
            yield self._batches(first, batches, models)
            if self._steps == before:
                raise WrongUse(
                    "a step of the logical world was left before its end. Iterate over each step that steps() yields: "
                    "every logical rank needs its batch"
                )

    def _batches(
        self, first: Any, batches: Iterator[Any], models: Sequence[torch.nn.Module]
    ) -> Iterator[Any]:
        nothing = object()

        def fetch(rank: int) -> Any:
            return first if rank == self.mine[0] else self._fetch(batches, rank, nothing)

        for rank, batch in self._step(models, fetch):
            if batch is nothing:
                raise WrongUse(
                    f"the loader has no batch for logical rank {rank}. Use an ElasticSampler(logical_world=...), and "
                    "DataLoader(batch_sampler=sampler.batches(...)): this has one for each logical rank"
                )
            yield batch

    def _fetch(self, batches: Iterator[Any], rank: int, otherwise: object) -> Any:
        with _other_generators(self._seed_of(rank, _FETCH)):
            return next(batches, otherwise)

    def _step(
        self, models: Sequence[torch.nn.Module], prepare: Callable[[int], Any]
    ) -> Iterator[tuple[int, Any]]:
        self._begin()
        if self._open is not None:  # a step that raised; its iterator may live as long as the traceback
            self._open.close()
        step = self._open = _Step([self._model(each) for each in models])
        try:
            for rank in self.mine:
                prepared = prepare(rank)
                step.begin_rank(rank, last=rank == self.mine[-1])
                generators.seed(self._seed_of(rank, _COMPUTE))
                yield rank, prepared
                step.end_rank(rank)
            step.finish()
            self._steps += 1
        finally:
            step.close()
            if self._open is step:
                self._open = None

    def _model(self, model: torch.nn.Module) -> LogicalModel:
        if model not in self._models:
            self._models[model] = attach(model, self.size, self._team)
        return self._models[model]

    def _seed_of(self, rank: int, stream: int) -> int:
        assert self._seed is not None
        return seeds.of_step(self._seed, self._steps, rank, self.size, stream)

    def _begin(self) -> None:
        """Take the seed and the generators of process 0, unless a commit has set them. Collective."""
        if self._seed is not None:
            return
        generators.load_numpy()  # now: its generator must not begin with a seed of this process inside of a step
        everyone = self._team.gather((self.size, self.threads))
        for rank, (size, threads) in enumerate(everyone):
            if (size, threads) != (self.size, self.threads):
                raise WrongValue(
                    f"the processes disagree: process {rank} has logical_world={size}, threads={threads}, but this one "
                    f"has logical_world={self.size}, threads={self.threads}. Use the same on all nodes"
                )
        self._seed, states = self._team.first(lambda: (torch.initial_seed(), generators.get()))
        generators.set(states)

    # --- values of all logical ranks -------------------------------------------------------------------

    def mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean over all logical ranks, with the same bits in every world, for example of the losses.

        `values`: one tensor for each logical rank of this process, in order. Collective.
        """
        if len(values) != len(self.mine):
            raise WrongValue(
                f"mean() needs one value for each of the {len(self.mine)} logical ranks of this process, but got "
                f"{len(values)}"
            )
        held = [value.detach().to("cpu", copy=True) for value in values]
        everything = [value for each in self._team.gather(held) for value in each]
        return (logical_ranks.tree_sum(everything, torch.add) / self.size).to(values[0].device)

    # --- the state of the job, for a State -------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._begin()
        return {
            "logical_world": self.size,
            "threads": self.threads,
            "seed": self._seed,
            "steps": torch.tensor(self._steps),
            "generators": generators.get(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, here in (("logical_world", self.size), ("threads", self.threads)):
            if state[name] != here:
                raise WrongValue(
                    f"cannot resume: the commit was made with {name}={state[name]}, but here it is {here}, so the "
                    f"training would not go on with the same bits. Use {name}={state[name]}, or use an empty folder to "
                    "start without a commit"
                )
        if self._open is not None:
            self._open.close()
            self._open = None
        generators.load_numpy()
        self._seed, self._steps = state["seed"], int(state["steps"])
        generators.set(state["generators"])


@contextmanager
def _other_generators(seed: int) -> Iterator[None]:
    outside = generators.get()
    generators.seed(seed)
    try:
        yield
    finally:
        generators.set(outside)


class _Step:
    """One step of this process, and what must be put back when it ends, also if it raised."""

    def __init__(self, models: Sequence[LogicalModel]) -> None:
        self._models = models
        self._outside = generators.get()
        self._closed = False
        try:
            for each in models:
                each.begin()
        except Exception:
            self.close()
            raise

    def begin_rank(self, rank: int, *, last: bool) -> None:
        self._check_open()
        for each in self._models:
            each.begin_rank(rank, last=last)

    def end_rank(self, rank: int) -> None:
        self._check_open()
        for each in self._models:
            each.end_rank(rank)

    def finish(self) -> None:
        for each in self._models:
            each.finish()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            generators.set(self._outside)
            for each in self._models:
                each.close()

    def _check_open(self) -> None:
        if self._closed:
            raise WrongUse("this step of the logical world has ended, because another one has begun")


def _size_from(text: str | None, processes: int) -> int:
    if text is None:
        return processes
    if not (text.isascii() and text.isdigit()):
        raise WrongValue(f"invalid {VARIABLE}={text!r}. Use a number of logical ranks")
    return int(text)
