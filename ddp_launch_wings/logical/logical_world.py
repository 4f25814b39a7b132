"""`LogicalWorld`: a training that belongs to N logical ranks, whatever number of processes carries them.

Each process runs its logical ranks one after the other. In each step a logical rank has

- its own samples (`ElasticSampler.batches`),
- its own random numbers: all generators are seeded from the seed of the job, the step and the logical rank. So nothing
  has to be kept, sent, or lost: any process can go on with any logical rank;
- its own gradients, which are summed in one order (`logical_ranks.py`), and divided by N at the end;
- the buffers that logical rank 0 had after the previous step, as with DDP, where rank 0 broadcasts its buffers.

Outside of these steps the processes have the generators of the job: those of process 0 when the training began.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp.comm_hooks.staged import Staged, Stages
from ddp.elastic import generators, sample_order
from ddp.elastic.sampler import CarriedRanks
from ddp.elastic.team import Team
from ddp.groups.single_tensor import all_gather
from ddp.reducer.bucket_sender import gradient_strides
from ddp.reducer.torch_reducer import reducer_of
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue
from ddp.telemetry.contracts import LOGICAL_WORLD
from ddp_launch_wings.logical import logical_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from ddp.reducer.grad_bucket import GradBucket
    from ddp.reducer.reducer import Reducer
    from ddp_launch_wings.logical.logical_ranks import Node

# --- the world -------------------------------------------------------------------------------------

_COMPUTE, _FETCH = 0, 1


class LogicalWorld(CarriedRanks):
    """N logical ranks. Without a number: DDP_LOGICAL_WORLD, which `ddp-launch --logical-world N` sets.

    Put it into the State: State(world=world, model=model, ...). `threads`: threads of torch in each process, because
    results on CPUs depend on it; None leaves torch's setting alone.
    """

    def __init__(
        self, size: int | None = None, *, threads: int | None = 1, group: ProcessGroup | None = None
    ) -> None:
        self._team = Team(group)
        self.size = _size_from(os.environ.get(LOGICAL_WORLD), self._team.size) if size is None else size
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
        with _other_generators(sample_order.mixed(self._seed, self._steps)):
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
        return logical_ranks.seed_of_step(self._seed, self._steps, rank, self.size, stream)

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
        raise WrongValue(f"invalid {LOGICAL_WORLD}={text!r}. Use a number of logical ranks")
    return int(text)


# --- a wrapped model -------------------------------------------------------------------------------
#
# A wrapped model in a logical world: its sums, and its switches for the steps of this process.

_FLOATS = ("torch.float32", "torch.float64")


class LogicalModel:
    """It does not keep the model alive: the world has the model as a weak key."""

    def __init__(self, model: Any, sums: LogicalSums, team: Team) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._sums = sums
        self._buffers = LogicalBuffers(model, team)
        self._before: tuple[bool, Any] | None = None

    def begin(self) -> None:
        model = self._model()
        if model.reducer.core.sender.joins:
            raise WrongUse(
                "a logical world cannot run inside of join(): every logical rank has a batch in every step. Remove "
                "join(), and use ElasticSampler.batches(), which gives all of them the same number of batches"
            )
        self._sums.begin()
        self._buffers.begin()
        self._before = (model.require_backward_grad_sync, model.modules_buffers)
        # The buffers of a step are those of logical ranks, not of processes: DDP must not broadcast them.
        model.modules_buffers = []

    def begin_rank(self, rank: int, *, last: bool) -> None:
        self._buffers.begin_rank()
        self._sums.begin_rank(rank, last=last)
        self._model().require_backward_grad_sync = last

    def end_rank(self, rank: int) -> None:
        self._sums.end_rank(rank)
        self._buffers.end_rank(rank)

    def finish(self) -> None:
        self._sums.finish()
        self._buffers.finish()

    def close(self) -> None:
        self._sums.drop()
        model = self._model()
        if self._before is not None and model is not None:
            (model.require_backward_grad_sync, model.modules_buffers), self._before = self._before, None


def attach(model: Any, logical_world: int, team: Team) -> LogicalModel:
    """Let the reducer of a model complete the sums of logical ranks. All processes do it between two backwards."""
    core, processes = reducer_of(model, "a logical world"), team.size
    if reason := _refusal(model, core, processes):
        raise WrongValue(f"a logical world does not support this model: {reason}")
    sums = LogicalSums(core.parameters, core.names, logical_world)
    on_cpu = core.sender.device.type == "cpu"
    as_tree = on_cpu and all(getattr(group, "ddp_sums_as_tree", False) for group in core.settings.groups)
    in_order = processes == 2 or as_tree  # a + b is b + a
    if processes == 1 or (in_order and logical_ranks.is_tree_of_processes(logical_world, processes)):
        core.sender.use_partial_sums(sums, None)
    else:
        core.sender.use_partial_sums(sums, (Exchange(sums, core.sender.group, logical_world), exchange))
    core.start_over()
    return LogicalModel(model, sums, team)


def _refusal(model: Any, core: Reducer, processes: int) -> str:
    """Say why the bits could not be the same, and what to do; an empty text if they can."""
    sender, settings = core.sender, core.settings
    other = [facts for facts in sender.facts if facts.dtype not in _FLOATS]
    sparse = [facts for facts in sender.facts if facts.sparse]
    batch_norm = any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in model.modules())
    problems = {
        "its process group does not have all processes of the job. Use the default group": (
            sender.group.size() != processes
        ),
        "it has a communication hook or a sharded optimizer, which sums in another way. Remove it": (
            (sender.hooked and sender.partial_sums is None) or sender.takes_gradients
        ),
        "SyncBatchNorm computes over processes, not over logical ranks. Use BatchNorm": batch_norm,
        "mixed_precision= is set. Use torch.autocast": model.mixed_precision is not None,
        "delay_all_reduce_named_params= is set. Remove it": bool(model._delay_all_reduce_params),
        "skip_all_reduce_unused_params= is set. Remove it": settings.skip_unused,
        f"the gradient of {sparse[0].name if sparse else ''} is sparse. Use dense gradients": bool(sparse),
        f"{other[0].name if other else ''} is not float32 or float64. Use torch.autocast for computations in half "
        "precision": bool(other),
    }
    return next((reason for reason, is_so in problems.items() if is_so), "")


# --- sums of gradients -----------------------------------------------------------------------------
#
# The gradients of the logical ranks of this process, summed in the order of `ddp_launch_wings.logical.logical_ranks`.
#
# The backward of each logical rank begins without gradients. Those of all logical ranks but the last are taken out
# of `.grad`, and added as soon as both parts of a node are there: at most one sum for each level of the tree is
# kept. The last backward is averaged by the reducer. It calls `fold` when gradients are ready, before they go into
# a bucket, so the sums of this process overlap with the backward, and the communication does as in any step.
#
# A gradient that is missing counts as zeros. Adding zeros changes only the sign of a negative zero. That is done too:
# where another process carries the logical rank, a bucket contains the zeros.

Gradients = list["torch.Tensor | None"]


class LogicalSums:
    """The sums of one model in this process. The reducer calls `fold` and reads `divisor`."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], logical_world: int) -> None:
        self.parameters = list(parameters)
        self.divisor = float(logical_world)
        self._names = list(names)
        self._logical_world = logical_world
        self._sums: list[tuple[Node, Gradients]] = []
        self._earlier: Gradients = []
        self._folds = 0  # how many sums the last gradients complete
        self._sends = False  # whether the backward is that of the last logical rank of this process
        self._folded: set[int] = set()

    # --- the steps of a process ----------------------------------------------------------------------

    def begin(self) -> None:
        """Put aside the gradients that the script has accumulated before this step."""
        self.drop()
        self._earlier = self._take()
        # A bucket may own this memory, and is used again in this step.
        self._earlier = [None if each is None else each.clone() for each in self._earlier]

    def begin_rank(self, rank: int, *, last: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._sends = last
        self._folded = set()
        if last:
            self._folds = self._count_folds(logical_ranks.raised((0, rank), self._logical_world))

    def end_rank(self, rank: int) -> None:
        """Take the gradients of a logical rank. Those of the last one are averaged already."""
        if self._sends:
            if len(self._folded) < len(self.parameters):
                raise WrongUse(
                    f"logical rank {rank} ended without an averaged backward of the model. Run forward and backward of "
                    "every model once for each logical rank, and do not use no_sync() around the last backward"
                )
            return
        node, grads = logical_ranks.raised((0, rank), self._logical_world), self._take()
        while self._sums and (joined := self._joined(self._sums[-1][0], node)) is not None:
            _left, earlier = self._sums.pop()
            node, grads = joined, _added(earlier, grads)
        self._sums.append((node, grads))

    def finish(self) -> None:
        with torch.no_grad():
            for parameter, earlier in zip(self.parameters, self._earlier, strict=True):
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self.drop()

    def drop(self) -> None:
        """Forget an unfinished step."""
        self._sums, self._earlier, self._sends = [], [], False

    def _take(self) -> Gradients:
        found: Gradients = []
        for i, parameter in enumerate(self.parameters):
            grad, parameter.grad = parameter.grad, None
            if grad is not None and grad.is_sparse:
                raise WrongType(
                    f"the gradient of {self._names[i]} is sparse: a logical world supports dense gradients only. Use a "
                    "layer with dense gradients, for example Embedding(sparse=False)"
                )
            found.append(grad if grad is None or not grad.requires_grad else grad.detach())
        return found

    def _joined(self, left: Node, right: Node) -> Node | None:
        return logical_ranks.parent(left, right, self._logical_world)

    def _count_folds(self, node: Node) -> int:
        count = 0
        while count < len(self._sums):
            joined = self._joined(self._sums[-1 - count][0], node)
            if joined is None:
                break
            node, count = joined, count + 1
        return count

    # --- for the reducer -----------------------------------------------------------------------------

    def fold(self, members: Sequence[int]) -> None:
        """Add the sums of this process to gradients of its last logical rank, before they go into a bucket."""
        if not self._sends:
            raise WrongUse(
                "a backward was averaged outside of a step of the logical world. Run it inside of steps() or ranks()"
            )
        self._folded.update(members)
        for _node, sums in self._sums[: -1 - self._folds : -1]:
            for i in members:
                parameter, earlier = self.parameters[i], sums[i]
                grad = parameter.grad
                if grad is not None and grad.requires_grad:
                    grad = grad.detach().clone()
                added = _added_one(earlier, grad)
                if added is not parameter.grad:
                    parameter.grad = added
        for sums in self.rest():
            for i in members:
                # Otherwise the parameter would count as unused in this process.
                if self.parameters[i].grad is None and (earlier := sums[i]) is not None:
                    self.parameters[i].grad = torch.zeros_like(earlier)

    def rest(self) -> list[Gradients]:
        """The sums that the last gradients do not complete, in the order of their logical ranks."""
        return [sums for _node, sums in self._sums[: len(self._sums) - self._folds]]


def _added_one(earlier: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    if earlier is None:
        return None if grad is None else grad.add_(0.0)
    return earlier.add_(0.0) if grad is None else grad.add_(earlier)


def _added(earlier: Gradients, grads: Gradients) -> Gradients:
    with torch.no_grad():
        return [_added_one(a, b) for a, b in zip(earlier, grads, strict=True)]


# --- exchange, where the group adds in another order -----------------------------------------------
#
# Complete the sums of all processes where the sum of the process group has another order.
#
# It has the form of a communication hook. Each process has one row for each node of its cover: the gradients of a
# bucket, in the layout of the bucket. Each process receives its slice of all rows, adds them in the order of the
# tree, and sends the total to all. Each element of a row is sent once, and each element of the total is sent once
# to every process.


class Exchange:
    """The state of the hook: the sums of this process, and where the rows of the others belong."""

    def __init__(self, sums: LogicalSums, group: dist.ProcessGroup, logical_world: int) -> None:
        self.sums = sums
        self.group = group
        self.logical_world = logical_world
        self.covers = logical_ranks.covers(logical_world, group.size())
        self.n_rows = max(map(len, self.covers))
        self.staged = Staged()
        self.index_of = {id(parameter): i for i, parameter in enumerate(sums.parameters)}


def exchange(state: Exchange, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.staged.add(bucket, _stages(state, bucket.buffer(), bucket.parameters()))  # type: ignore[arg-type]


def _stages(state: Exchange, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> Stages:
    group, numel = state.group, buffer.numel()
    size, share = group.size(), -(-numel // group.size())
    sent = buffer.new_zeros(size, state.n_rows, share)
    for number, row in enumerate([*_rows_of_rest(state, buffer, parameters), buffer]):
        padded = row.new_zeros(size * share)
        padded[:numel].copy_(row)
        sent[:, number] = padded.view(size, share)
    received = torch.empty_like(sent)
    yield [dist.all_to_all_single(received, sent, group=group, async_op=True)]

    parts = {
        node: received[process, number]
        for process, nodes in enumerate(state.covers)
        for number, node in enumerate(nodes)
    }
    mine = logical_ranks.total(parts, state.logical_world, torch.add)
    whole = mine.new_empty(size * share)
    yield [all_gather(whole, mine, group)]

    buffer.copy_(whole[:numel])
    return buffer


def _rows_of_rest(
    state: Exchange, buffer: torch.Tensor, parameters: list[torch.Tensor]
) -> list[torch.Tensor]:
    rows = []
    for sums in state.sums.rest():
        row, offset = torch.zeros_like(buffer), 0
        for parameter in parameters:
            gradient = sums[state.index_of[id(parameter)]]
            if gradient is not None:
                place = row.as_strided(parameter.shape, gradient_strides(parameter), offset)
                place.copy_(gradient)
            offset += parameter.numel()
        rows.append(row)
    return rows


# --- buffers ---------------------------------------------------------------------------------------
#
# The buffers of a model, such as the running statistics of BatchNorm: all logical ranks begin a step with the same.
#
# After a step they are those of logical rank 0, in all processes. With DDP it is the same: before a forward, rank 0
# broadcasts its buffers, and what the others have is lost.
#
# Most buffers never change, such as masks. Only those that have changed are copied and sent: those that any process
# has changed. A tensor counts its changes (`_version`), but torch's BatchNorm writes its statistics without
# counting. So numbers with a fraction are compared, bit by bit. On an accelerator the host would have to wait for
# that, so there they count as changed.


@dataclass
class _Buffer:
    """The buffer of a module under a name, and what it was when the step began."""

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    version: int = -1
    before: torch.Tensor | None = None

    @property
    def now(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.name)
        return tensor

    @property
    def has_changed(self) -> bool:
        if self.before is None or self.now is not self.tensor or self.tensor._version != self.version:
            return True
        if not self.tensor.is_floating_point() and not self.tensor.is_complex():
            return False
        return self.tensor.device.type != "cpu" or not torch.equal(
            _as_bytes(self.tensor), _as_bytes(self.before)
        )

    def note(self) -> None:
        if self.has_changed:
            self.tensor = self.now
            self.before = self.tensor.detach().clone()
            self.version = self.tensor._version

    def put(self, value: torch.Tensor) -> None:
        """A script may have replaced the tensor in its forward: take the old one again."""
        if value.shape != self.tensor.shape:
            raise WrongUse(
                f"the buffer {self.name} of shape {tuple(self.tensor.shape)} now has the shape {tuple(value.shape)}. A "
                "logical world needs buffers of constant shape"
            )
        setattr(self.owner, self.name, self.tensor)
        with torch.no_grad():
            self.tensor.copy_(value)

    def restore(self) -> None:
        if self.has_changed:
            assert self.before is not None
            self.put(self.before)
            self.version = self.tensor._version


class LogicalBuffers:
    def __init__(self, model: torch.nn.Module, team: Team) -> None:
        self._team = team
        self._all = [
            _Buffer(owner, name, tensor)
            for owner in model.modules()
            for name, tensor in owner.named_buffers(recurse=False)
        ]
        self._changed: list[bool] = []
        self._kept: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self._changed, self._kept = [False] * len(self._all), {}
        for each in self._all:
            each.note()

    def begin_rank(self) -> None:
        for each in self._all:
            each.restore()

    def end_rank(self, rank: int) -> None:
        for i, each in enumerate(self._all):
            if each.has_changed:
                self._changed[i] = True
                if rank == 0:
                    self._kept[i] = each.now.detach().clone()

    def finish(self) -> None:
        if not self._all:
            return
        chosen = [
            each for each, changed in zip(self._all, self._team.union(self._changed), strict=True) if changed
        ]
        for i, value in self._kept.items():
            self._all[i].put(value)
        if chosen and self._team.size > 1:
            self._send(chosen)

    def _send(self, chosen: Sequence[_Buffer]) -> None:
        flat = self._team.share(torch.cat([_as_bytes(each.now) for each in chosen]))
        sizes = [each.tensor.nbytes for each in chosen]
        for each, piece in zip(chosen, torch.split(flat, sizes), strict=True):
            each.put(piece.clone().view(each.tensor.dtype).view(each.tensor.shape))


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
