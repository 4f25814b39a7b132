"""Which parameters of a module the wrapper can average: those that are sharded, and those that were added later.

- Tensor parallelism (`parallelize_module`) makes DTensors. torch's class averages their local parts, if it gets the
  dimension of the mesh along which the model is replicated (`device_mesh=mesh["dp"]`).
- `fully_shard` makes DTensors and gathers them itself, so nothing may replace them.
- `FullyShardedDataParallel` holds another shard on each rank in an ordinary tensor. A broadcast from rank 0 would
  overwrite it without an error.

The wrapper refuses what it would get wrong, before it communicates. Parameters that it ignores may be sharded.

Parameters that were unfrozen or added after wrapping are not averaged (`NotAveraged`). This check reads the frozen
parameters before every forward, which is cheap. It walks the whole module only if any module of the process has
registered a parameter or a child since the last walk.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as registration

from ddp.telemetry import torch_names
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    import torch

_TENSORS, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"
_IGNORE = (
    "Or exclude them with DistributedDataParallel.ignore_parameters_and_buffers(module, names), if their gradients are "
    "averaged by other means"
)


def refuse_sharded(module: torch.nn.Module, device_mesh: Any) -> None:
    """Raise if the module has sharded parameters that the wrapper cannot average."""
    ignored = set(getattr(module, torch_names.IGNORED, ()))
    for owner, names in _sharded_modules(module):
        if found := sorted(set(names) - ignored):
            raise WrongUse(
                f"DistributedDataParallel cannot average {found[0]}: {owner} has sharded it. To shard within a group "
                "and replicate over groups, use fully_shard with a two-dimensional mesh, without this wrapper. "
                f"{_IGNORE}"
            )
    kind = getattr(sys.modules.get(_TENSORS), "DTensor", None)
    if kind is None or device_mesh is not None:
        return
    for name, parameter in module.named_parameters():
        if isinstance(parameter, kind) and name not in ignored:
            raise WrongUse(
                f"DistributedDataParallel cannot average {name}: it is a DTensor on {parameter.device_mesh}. Pass the "
                "dimension of the mesh along which the model is replicated, for example device_mesh=mesh['dp'], where "
                f"mesh also has the dimension of the shards. {_IGNORE}"
            )


def _sharded_modules(module: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each module that FSDP manages, and the names of the parameters in it."""
    fsdp = sys.modules.get(_FSDP)
    names = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel"}
    kinds = {kind: said for name, said in names.items() if (kind := getattr(fsdp, name, None))}
    for path, each in module.named_modules():
        for kind, said in kinds.items():
            if isinstance(each, kind):
                yield said, [f"{path}.{name}".removeprefix(".") for name, _ in each.named_parameters()]


_registrations = 0
_counting = False


def _count_registration(*_what: Any) -> None:
    global _registrations
    _registrations += 1


def _count_registrations() -> None:
    global _counting
    if not _counting:
        _counting = True
        registration.register_module_parameter_registration_hook(_count_registration)
        registration.register_module_module_registration_hook(_count_registration)


class NotAveraged:
    """The parameters of a module that are not averaged."""

    def __init__(
        self, module: torch.nn.Module, averaged: Iterable[torch.Tensor], ignored: Container[str]
    ) -> None:
        _count_registrations()
        self._seen = _registrations
        self._module = module
        self._ignored = ignored
        self._averaged = {id(parameter) for parameter in averaged}
        self._others = self._unaveraged()

    def _unaveraged(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in self._averaged and name not in self._ignored
        ]

    def not_averaged(self) -> list[str]:
        """Return the parameters that were unfrozen or added since the module was wrapped."""
        if self._seen != _registrations:
            self._seen, self._others = _registrations, self._unaveraged()
        return [name for name, parameter in self._others if parameter.requires_grad]
