"""The contents of a State: objects with a state dictionary, and plain values. Captures and restores them.

State dictionaries are torch's own. With FSDP2 their parameters are DTensors. The path of an optimizer state contains
the index of the parameter. The sharding of this parameter is also the sharding of the state. This is enough to give
each rank its part in a world of another size.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp.elastic import dcp_keys, leaves
from ddp.elastic.leaves import Leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddp.elastic.dcp_keys import Names
    from ddp.elastic.image import Image

_OF_PARAMETER = re.compile(r"state\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Captured:
    skeleton: Any
    tensors: list[torch.Tensor]
    paths: list[str]
    names: Callable[[], Names]  # of the parameters in optimizers; only commits to disk need them


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def unwrap(value: Any) -> Any:
    """Remove a DDP wrapper: a commit contains the model, with the model's own names."""
    return value.module if isinstance(value, DistributedDataParallel) else value


class Contents:
    def __init__(self, named: dict[str, Any]) -> None:
        self.objects = {name: unwrap(value) for name, value in named.items() if is_stateful(value)}
        self.fields = {name: value for name, value in named.items() if name not in self.objects}
        for name, value in self.objects.items():
            _check_shareable(name, value)

    def capture(self) -> Captured:
        tree = {
            "objects": {name: each.state_dict() for name, each in self.objects.items()},
            "fields": self.fields,
        }
        return Captured(*leaves.disassemble(tree), self.names)

    def names(self) -> Names:
        """The names of the parameters of optimizers, if they are all in one module of this State."""
        modules = [each for each in self.objects.values() if isinstance(each, torch.nn.Module)]
        known = [
            {id(parameter): dcp_keys.bare(name) for name, parameter in each.named_parameters()}
            for each in modules
        ]
        found = {}
        for name, each in self.objects.items():
            if isinstance(each, torch.optim.Optimizer):
                ids = [id(parameter) for group in each.param_groups for parameter in group["params"]]
                for names in known:
                    if all(number in names for number in ids):
                        found[name] = tuple(names[number] for number in ids)
                        break
        return found

    def partition(self) -> tuple[tuple[int, int], int]:
        """Return this rank's part, the number of parts, and a hash of which slice of each tensor it has."""
        tensors = list(self._templates().values())
        part = leaves.part_of(tensors)
        return part or (0, 1), self.fingerprint()

    def fingerprint(self) -> int:
        regions = [(path, leaves.leaf_of(each, path).region) for path, each in self._templates().items()]
        return zlib.crc32(repr(regions).encode())

    def _templates(self) -> dict[str, torch.Tensor]:
        """The tensors of modules, by path. They exist, with their sharding, before anything is loaded."""
        found: dict[str, torch.Tensor] = {}
        for name, each in self.objects.items():
            if isinstance(each, torch.nn.Module):
                _skeleton, tensors, paths = leaves.disassemble(each.state_dict())
                found |= {
                    f"objects.{name}.{path}": tensor for path, tensor in zip(paths, tensors, strict=True)
                }
        return found

    def restore(self, images: Iterable[Image]) -> int:
        """Load the images one by one, in the order of their parts; return the world size of the job that wrote them."""
        assembly: _Assembly | None = None
        for each in images:
            assembly = assembly or _Assembly(each, self._all_templates())
            assembly.take(each)
        assert assembly is not None
        tree = leaves.assemble(assembly.skeleton, assembly.tensor)
        self._load(tree)
        return assembly.world_size

    def _all_templates(self) -> _Templates:
        parameters = {
            f"objects.{name}.": [p for group in each.param_groups for p in group["params"]]
            for name, each in self.objects.items()
            if isinstance(each, torch.optim.Optimizer)
        }
        return _Templates(self._templates(), parameters)

    def _load(self, tree: dict[str, Any]) -> None:
        there, here = set(tree["objects"]), set(self.objects)
        if there != here:
            raise ValueError(
                f"cannot resume: the commit has the objects {', '.join(sorted(there))}, but this State has "
                f"{', '.join(sorted(here))}. Use the same names as before, or use an empty "
                "folder to start without a commit"
            )
        for name, each in self.objects.items():
            state = tree["objects"][name]
            # A module copies the tensors; other objects keep them, so they need a copy.
            each.load_state_dict(state if isinstance(each, torch.nn.Module) else _own_copy(state))
        self.fields.update((name, value) for name, value in _own_copy(tree["fields"]).items())


def _own_copy(tree: Any) -> Any:
    skeleton, tensors, _paths = leaves.disassemble(tree)
    return leaves.assemble(skeleton, lambda number: tensors[number].clone())


def _check_shareable(name: str, value: Any) -> None:
    """Raise if a state differs between ranks but is not stored in DTensors: then it cannot be resharded."""
    for kind in ("ZeroRedundancyOptimizer", "ShardedOptimizer"):
        if kind in {each.__name__ for each in type(value).__mro__}:
            raise TypeError(
                f"cannot commit {name}: a {kind} is sharded, but its state does not describe the shards, so it cannot "
                "be restored on other ranks. Use FSDP2, or call consolidate_state_dict() on all ranks, and then on "
                "rank 0 torch.save() the result of state_dict()"
            )


@dataclass(frozen=True, slots=True)
class _Templates:
    """The existing tensors that define the layout of restored ones."""

    modules: dict[str, torch.Tensor]
    parameters: dict[str, list[torch.Tensor]]  # of each optimizer, by the prefix of its paths

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


class _Assembly:
    """The tensors of a commit while they are restored from its images."""

    def __init__(self, first: Image, templates: _Templates) -> None:
        self.skeleton = first.skeleton()
        self.world_size = first.head.world_size
        self._templates = [templates.of(leaf) for leaf in first.layout.leaves]
        pairs = zip(first.layout.leaves, self._templates, strict=True)
        self._leaves = [_target_leaf(leaf, template) for leaf, template in pairs]
        self._filled = [leaves.Filled(leaf) for leaf in self._leaves]

    def take(self, image: Image) -> None:
        for number, filled in enumerate(self._filled):
            piece = image.tensor(number)
            if piece is not None:
                filled.take(image.layout.leaves[number].region, piece)

    def tensor(self, number: int) -> torch.Tensor:
        return leaves.with_sharding(self._filled[number].result(), self._templates[number])


def _target_leaf(leaf: Leaf, template: torch.Tensor | None) -> Leaf:
    if template is not None and leaves.is_dtensor(template):
        today = leaves.leaf_of(template, leaf.path)
        if today.shape != leaf.shape:
            raise ValueError(
                f"cannot resume {leaf.path}: its shape is {leaf.shape} in the commit, but {today.shape} here. "
                "Use the same model, or use an empty folder to start without a commit"
            )
        return Leaf(leaf.path, leaf.dtype, leaf.shape, today.stride, today.region, today.sharded)
    if leaf.sharded:
        stride = template.stride() if template is not None else ()
        stride = stride if len(stride) == len(leaf.shape) else torch.empty(leaf.shape, device="meta").stride()
        return Leaf(leaf.path, leaf.dtype, leaf.shape, stride, leaves.whole(leaf.shape), sharded=False)
    return leaf
