"""The arguments of a `ShardedOptimizer`: what it accepts, and the error for what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer.module import DistributedDataParallel
from ddp.reducer.torch_reducer import reducer_of
from ddp.telemetry.coded import WrongType, WrongValue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

_ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
}


def groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups from the forms that torch accepts: parameters, (name, parameter) pairs, or groups."""
    given = list(params)
    found = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": _tensors(group["params"])} for group in found]


def _tensors(params: Any) -> list[torch.Tensor]:
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return [each[1] if isinstance(each, tuple) else each for each in listed]


def check(model: Any, optimizer_class: type[Optimizer], elementwise: bool) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise WrongType(
            f"ShardedOptimizer needs a ddp.DistributedDataParallel, but got a {type(model).__name__}. Wrap the model "
            "first"
        )
    reducer_of(model, "ShardedOptimizer")
    if model.mixed_precision is not None:
        raise WrongValue("ShardedOptimizer does not support DDP's mixed_precision. Use torch.autocast")
    name = optimizer_class.__name__
    torchs = optimizer_class.__module__.startswith("torch.optim")
    if not elementwise and not (torchs and name in _ELEMENTWISE):
        raise WrongValue(
            f"ShardedOptimizer splits parameters at any element, but it is not known whether {name} updates each "
            "element independently. "
            f"If it does, pass elementwise=True. Otherwise use one of {', '.join(sorted(_ELEMENTWISE))}"
        )
