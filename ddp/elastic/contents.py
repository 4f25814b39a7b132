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

from ddp.elastic import bucket_plans, copies, dcp_keys, leaves, own, shares
from ddp.elastic.leaves import OWN, Leaf
from ddp.groups import accelerator
from ddp.telemetry.coded import WrongType, WrongValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddp.elastic.dcp_keys import Names
    from ddp.elastic.image import Image

_BUCKETS = "buckets"  # of wrapped models
_SHARED_OUT = "shared_out"  # the names of the objects of which each part has a share
_OF_PARAMETER = re.compile(r"state\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Captured:
    skeleton: Any
    tensors: list[Any]  # or pieces of them
    paths: list[str]
    names: Callable[[], Names]  # of the parameters in optimizers; only commits to disk need them
    own: Any  # the skeleton of what belongs to this rank


def unwrap(value: Any) -> Any:
    """Remove a DDP wrapper: a commit contains the model, with the model's own names."""
    return value.module if isinstance(value, DistributedDataParallel) else value


class Contents:
    def __init__(self, named: dict[str, Any]) -> None:
        shared, self.own = own.sort_out(named)
        self._wrapped = bucket_plans.wrapped(named)
        self.averagers = own.averagers(named)
        self.objects = {name: unwrap(value) for name, value in shared.items() if own.is_stateful(value)}
        self.fields = {name: value for name, value in shared.items() if name not in self.objects}
        for name, value in self.objects.items():
            _check_shareable(name, value)
        if self.averagers and (
            self._shared_out() or leaves.part_of(list(self._templates().values()), (0, 1))
        ):
            raise WrongType(
                f"cannot commit {type(self.averagers[0]).__name__} together with a model or an optimizer in shards: "
                "it lets each rank train a whole model of its own. Use one or the other"
            )

    def capture(self) -> Captured:
        tree = {
            "objects": {
                name: shares.tree_of(each) if isinstance(each, shares.SharedOut) else each.state_dict()
                for name, each in self.objects.items()
            },
            "fields": self.fields,
            _SHARED_OUT: list(self._shared_out()),
            _BUCKETS: bucket_plans.of(self._wrapped),
            OWN: {name: each.state() for name, each in self.own.items()},
        }
        skeleton, tensors, paths = leaves.disassemble(tree)
        return Captured(skeleton, tensors, paths, self.names, skeleton.pop(OWN))

    def is_on_device(self) -> bool:
        """Whether some of it is on an accelerator whose work can be overlapped with copies."""
        device = accelerator.current()
        if device is None or not hasattr(torch.get_device_module(device), "Stream"):
            return False
        return any(leaves.local(each).device.type == device.type for each in self.capture().tensors)

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
                ids = list(map(id, parameters_of(each)))
                for names in known:
                    if all(number in names for number in ids):
                        found[name] = tuple(names[number] for number in ids)
                        break
        return found

    def partition(self, rank: int, size: int) -> tuple[tuple[int, int], int]:
        """Return this rank's part, the number of parts, and a hash of which slice of each tensor it has.

        `rank`, `size`: in the group of the State.
        """
        found = {each.part() for each in self._shared_out().values()}
        of_modules = leaves.part_of(list(self._templates().values()), (rank, size))
        found |= set() if of_modules is None else {of_modules}
        if len(found) > 1:  # they are cut differently: each rank is a part
            return (rank, size), self.fingerprint()
        return next(iter(found), (0, 1)), self.fingerprint()

    def fingerprint(self) -> int:
        regions: list[Any] = [
            (path, leaves.leaf_of(each, path).region) for path, each in self._templates().items()
        ]
        regions += [(name, each.ranges()) for name, each in self._shared_out().items()]
        return zlib.crc32(repr(regions).encode())

    def _shared_out(self) -> dict[str, shares.SharedOut]:
        return {name: each for name, each in self.objects.items() if isinstance(each, shares.SharedOut)}

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
        assembly = _Assembly(self._all_templates())
        for each in images:
            assembly.take(each)
        self._load(assembly.tree(), assembly.home_of)
        return assembly.world_size

    def _all_templates(self) -> _Templates:
        optimizers = {
            name: each for name, each in self.objects.items() if isinstance(each, torch.optim.Optimizer)
        }
        parameters = {f"objects.{name}.": parameters_of(each) for name, each in optimizers.items()}
        shared = {f"objects.{name}.": each for name, each in self._shared_out().items()}
        return _Templates(self._templates(), parameters, shared, copies.homes(self.objects))

    def _load(self, tree: dict[str, Any], home_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        there, here = set(tree["objects"]), set(self.objects)
        if there != here:
            raise WrongValue(
                f"cannot resume: the commit has the objects {', '.join(sorted(there))}, but this State has "
                f"{', '.join(sorted(here))}. Use the same names as before, or use an empty "
                "folder to start without a commit"
            )
        for name, each in self.objects.items():
            state = tree["objects"][name]
            if isinstance(each, shares.SharedOut):
                shares.load(each, state)
                continue
            # A module copies the tensors; other objects keep them, so they need a copy.
            is_copied = isinstance(each, torch.nn.Module)
            each.load_state_dict(state if is_copied else copies.owned(state, home_of))
        self.fields.update((name, value) for name, value in copies.owned(tree["fields"]).items())
        bucket_plans.restore(self._wrapped, tree.get(_BUCKETS, {}))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if isinstance(optimizer, shares.SharedOut):
        return optimizer.whole_parameters()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_shareable(name: str, value: Any) -> None:
    """Raise if a state differs between ranks, and nothing tells how: then it cannot be resharded."""
    if "ZeroRedundancyOptimizer" in {each.__name__ for each in type(value).__mro__}:
        raise WrongType(
            f"cannot commit {name}: a ZeroRedundancyOptimizer is sharded, but its state does not describe the shards, "
            "so it cannot be restored on other ranks. Use ddp.ShardedOptimizer or FSDP2. Or call "
            "consolidate_state_dict() on all ranks, and then on rank 0 torch.save() the result of state_dict()"
        )


@dataclass(frozen=True, slots=True)
class _Templates:
    """The existing tensors that define the layout of restored ones."""

    modules: dict[str, torch.Tensor]
    parameters: dict[str, list[torch.Tensor]]  # of each optimizer, by the prefix of its paths
    shared_out: dict[str, shares.SharedOut]  # likewise
    homes: dict[str, torch.Tensor]  # that optimizers have now, by path

    def of(self, leaf: Leaf) -> torch.Tensor | None:
        found = self.modules.get(leaf.path)
        if found is not None:
            return found
        for prefix, parameters in self.parameters.items():
            number = _number_in(leaf.path, prefix)
            if number is not None and number < len(parameters) and prefix not in self.shared_out:
                parameter = parameters[number]
                if tuple(parameter.shape) == leaf.shape:
                    return parameter
        return None

    def ranges(self, leaf: Leaf) -> list[shares.Range] | None:
        """The ranges of the leaf that this rank wants; None if it wants a region, as usual."""
        for prefix, optimizer in self.shared_out.items():
            number = _number_in(leaf.path, prefix)
            if number is not None and number < len(parameters := self.parameters[prefix]):
                if leaf.shape != tuple(parameters[number].shape):
                    return None
                if not optimizer.is_elementwise(number, leaf.path.rpartition(".")[2], leaf.shape):
                    return None
                return [each for each in shares.ranges_of(optimizer) if each.number == number]
        return None


def _number_in(path: str, prefix: str) -> int | None:
    """The number of the parameter in the path of the state of an optimizer."""
    found = path.startswith(prefix) and _OF_PARAMETER.match(path, len(prefix))
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class _Ref:
    """The place of a tensor in a skeleton, by its path."""

    path: str


class _Assembly:
    """The tensors of a commit while they are restored from its images."""

    def __init__(self, templates: _Templates) -> None:
        self.world_size = 0
        self._templates = templates
        self._tree: Any = None
        self._found: dict[str, _Wanted] = {}
        self._homes: dict[int, torch.Tensor] = {}  # by the id of what is to be copied there

    def home_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The existing tensor that can take the content of one in the tree."""
        return self._homes.get(id(tensor))

    def take(self, image: Image) -> None:
        keys = _keys(image.layout.leaves)
        self._merge(leaves.assemble(image.skeleton(), lambda number: _Ref(keys[number])))
        self.world_size = self.world_size or image.head.world_size
        for number, leaf in enumerate(image.layout.leaves):
            if leaf.is_own:
                continue
            if keys[number] not in self._found:
                self._found[keys[number]] = self._wanted(leaf, keys[number])
            piece = image.tensor(number)
            if piece is not None:
                self._found[keys[number]].filled.take(leaf.region, piece)

    def _merge(self, tree: Any) -> None:
        if self._tree is None:
            self._tree = tree
        for name in self._tree.get(_SHARED_OUT, ()):
            shares.merge(self._tree["objects"][name]["state"], tree["objects"][name]["state"])

    def _wanted(self, leaf: Leaf, key: str) -> _Wanted:
        if (ranges := self._templates.ranges(leaf)) is not None:
            return _Wanted(shares.Targets(leaf, ranges), None)
        template = self._templates.of(leaf)
        target = _target_leaf(leaf, template)
        home = self._templates.homes.get(key)
        if home is not None and not copies.fits(home, target, template):
            home = None
        return _Wanted(leaves.Filled(target), template, home)

    def tree(self) -> dict[str, Any]:
        def tensor(node: Any) -> Any:
            if not isinstance(node, _Ref):
                return leaves.KEEP
            wanted = self._found[node.path]
            result = wanted.filled.result()
            if isinstance(result, dict):
                return result
            if wanted.home is not None:
                self._homes[id(result)] = wanted.home
                return result
            return leaves.with_sharding(result, wanted.template)

        made: dict[str, Any] = leaves.replaced(self._tree, tensor)
        return made


@dataclass(frozen=True, slots=True)
class _Wanted:
    filled: leaves.Filled | shares.Targets
    template: torch.Tensor | None
    home: torch.Tensor | None = None


def _keys(described: Iterable[Leaf]) -> list[str]:
    """The paths of the leaves. Pieces of one tensor have the same path; other tensors get different ones."""
    taken: set[str] = set()
    keys = []
    for leaf in described:
        key = leaf.path
        while key in taken and not leaf.sharded:  # {"a.b": x, "a": {"b": y}}
            key += "~"
        taken.add(key)
        keys.append(key)
    return keys


def _target_leaf(leaf: Leaf, template: torch.Tensor | None) -> Leaf:
    if template is not None and leaves.is_dtensor(template):
        today = leaves.leaf_of(template, leaf.path)
        if today.shape != leaf.shape:
            raise WrongValue(
                f"cannot resume {leaf.path}: its shape is {leaf.shape} in the commit, but {today.shape} here. "
                "Use the same model, or use an empty folder to start without a commit"
            )
        return Leaf(leaf.path, leaf.dtype, leaf.shape, today.stride, today.region, today.sharded)
    if leaf.sharded:
        stride = template.stride() if template is not None else ()
        stride = stride if len(stride) == len(leaf.shape) else torch.empty(leaf.shape, device="meta").stride()
        return Leaf(leaf.path, leaf.dtype, leaf.shape, stride, leaves.whole(leaf.shape), sharded=False)
    return leaf
