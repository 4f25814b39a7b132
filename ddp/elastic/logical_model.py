"""A wrapped model in a logical world: its sums, and its switches for the steps of this process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import logical_ranks
from ddp.elastic.logical_buffers import LogicalBuffers
from ddp.elastic.logical_exchange import Exchange, exchange
from ddp.elastic.logical_sums import LogicalSums
from ddp.reducer.torch_reducer import reducer_of
from ddp.telemetry.coded import WrongUse, WrongValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.elastic.team import Team
    from ddp.reducer.reducer import Reducer

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
