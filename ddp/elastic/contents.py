"""What is kept: objects that have a state dictionary, and plain values; taken out of them, and put back.

State dictionaries are torch's own. FSDP2 gives its parameters in them as DTensors; optimizer state has the
number of its parameter in the path, and so the parameter's sharding. That is all that is needed to give
each rank its part back in a world of another size.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp.elastic import leaves
from ddp.elastic.leaves import Leaf

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddp.elastic.image import Image

_OF_PARAMETER = re.compile(r"state\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Captured:
    skeleton: Any
    tensors: list[torch.Tensor]
    paths: list[str]


def stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def bare(value: Any) -> Any:
    """A commit is of the model, not of what it is wrapped in: names in it are those of the model alone."""
    return value.module if isinstance(value, DistributedDataParallel) else value


class Contents:
    def __init__(self, named: dict[str, Any]) -> None:
        self._objects = {name: bare(value) for name, value in named.items() if stateful(value)}
        self.fields = {name: value for name, value in named.items() if name not in self._objects}
        for name, value in self._objects.items():
            _refuse_other_state_on_each_rank(name, value)

    def capture(self) -> Captured:
        tree = {
            "objects": {name: each.state_dict() for name, each in self._objects.items()},
            "fields": self.fields,
        }
        return Captured(*leaves.taken_apart(tree))

    def footing(self) -> tuple[tuple[int, int], int]:
        """This rank's part, the number of parts, and a fingerprint of the regions of the modules' tensors in it."""
        tensors = list(self._templates().values())
        part = leaves.part_of(tensors)
        return part or (0, 1), self.fingerprint()

    def fingerprint(self) -> int:
        regions = [(path, leaves.leaf_of(each, path).region) for path, each in self._templates().items()]
        return zlib.crc32(repr(regions).encode())

    def _templates(self) -> dict[str, torch.Tensor]:
        """The tensors of modules, by path: they are there, and laid out, before anything is loaded."""
        found: dict[str, torch.Tensor] = {}
        for name, each in self._objects.items():
            if isinstance(each, torch.nn.Module):
                _skeleton, tensors, paths = leaves.taken_apart(each.state_dict())
                found |= {
                    f"objects.{name}.{path}": tensor for path, tensor in zip(paths, tensors, strict=True)
                }
        return found

    def restore(self, images: Iterable[Image]) -> int:
        """Takes the images one by one, the first part first; returns the world size of who made them."""
        filling: _Filling | None = None
        for each in images:
            filling = filling or _Filling(each, self._like())
            filling.take(each)
        assert filling is not None
        tree = leaves.put_together(filling.skeleton, filling.tensor)
        self._load(tree)
        return filling.world_size

    def _like(self) -> _Like:
        parameters = {
            f"objects.{name}.": [p for group in each.param_groups for p in group["params"]]
            for name, each in self._objects.items()
            if isinstance(each, torch.optim.Optimizer)
        }
        return _Like(self._templates(), parameters)

    def _load(self, tree: dict[str, Any]) -> None:
        there, here = set(tree["objects"]), set(self._objects)
        if there != here:
            raise ValueError(
                f"the commit is of {', '.join(sorted(there))}; this State has {', '.join(sorted(here))}. "
                "Give it the same names as before, or start from an empty folder"
            )
        for name, each in self._objects.items():
            state = tree["objects"][name]
            # A module copies what it is given; others keep it, so they get their own.
            each.load_state_dict(state if isinstance(each, torch.nn.Module) else _own_copy(state))
        self.fields.update((name, value) for name, value in _own_copy(tree["fields"]).items())


def _own_copy(tree: Any) -> Any:
    skeleton, tensors, _paths = leaves.taken_apart(tree)
    return leaves.put_together(skeleton, lambda number: tensors[number].clone())


def _refuse_other_state_on_each_rank(name: str, value: Any) -> None:
    """Only what is the same on all ranks, or known to be sharded, can be given to others."""
    for kind in ("ZeroRedundancyOptimizer", "ShardedOptimizer"):
        if kind in {each.__name__ for each in type(value).__mro__}:
            raise TypeError(
                f"{name}: a {kind} holds a share of the state on each rank and does not say which. Use FSDP2, or "
                "save what consolidate_state_dict() gathers by torch.save, at checkpoints of your own"
            )


@dataclass(frozen=True, slots=True)
class _Like:
    """Which tensor of today a leaf of the commit is to be laid out as."""

    modules: dict[str, torch.Tensor]
    parameters: dict[str, list[torch.Tensor]]  # of each optimizer, by the beginning of its paths

    def of(self, leaf: Leaf) -> torch.Tensor | None:
        found = self.modules.get(leaf.path)
        if found is not None:
            return found
        for prefix, parameters in self.parameters.items():
            numbered = leaf.path.startswith(prefix) and _OF_PARAMETER.match(leaf.path, len(prefix))
            if numbered and int(numbered[1]) < len(parameters):
                parameter = parameters[int(numbered[1])]
                if tuple(parameter.shape) == leaf.shape:
                    return parameter
        return None


class _Filling:
    """The commit's tensors, as far as they have come in."""

    def __init__(self, first: Image, like: _Like) -> None:
        self.skeleton = first.skeleton()
        self.world_size = first.head.world_size
        self._templates = [like.of(leaf) for leaf in first.layout.leaves]
        pairs = zip(first.layout.leaves, self._templates, strict=True)
        self._leaves = [_wanted(leaf, template) for leaf, template in pairs]
        self._filled = [leaves.Filled(leaf) for leaf in self._leaves]

    def take(self, image: Image) -> None:
        for number, filled in enumerate(self._filled):
            piece = image.tensor(number)
            if piece is not None:
                filled.take(image.layout.leaves[number].region, piece)

    def tensor(self, number: int) -> torch.Tensor:
        result = self._filled[number].result()
        template = self._templates[number]
        if template is None or not leaves.is_dtensor(template):
            return result
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            result.to(template.device),
            template.device_mesh,
            template.placements,
            run_check=False,
            shape=template.shape,
            stride=template.stride(),
        )


def _wanted(leaf: Leaf, template: torch.Tensor | None) -> Leaf:
    if template is not None and leaves.is_dtensor(template):
        today = leaves.leaf_of(template, leaf.path)
        if today.shape != leaf.shape:
            raise ValueError(f"{leaf.path}: {leaf.shape} in the commit, {today.shape} in this script")
        return Leaf(leaf.path, leaf.dtype, leaf.shape, today.stride, today.region, today.sharded)
    if leaf.sharded:
        stride = template.stride() if template is not None else ()
        stride = stride if len(stride) == len(leaf.shape) else _contiguous(leaf.shape)
        return Leaf(leaf.path, leaf.dtype, leaf.shape, stride, leaves.whole(leaf.shape), sharded=False)
    return leaf


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
