"""The contents of a State: objects with a state dictionary, and plain values. Captures and restores them.

State dictionaries are torch's own. With FSDP2 their parameters are DTensors. The path of an optimizer state contains
the index of the parameter. The sharding of this parameter is also the sharding of the state. This is enough to give
each rank its part in a world of another size.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp.elastic import own
from ddp.elastic.files import dcp
from ddp.elastic.files.checkpoint import Checkpoint, CheckpointError
from ddp.elastic.files.dcp import Names
from ddp.elastic.images import copies, leaves
from ddp.elastic.images.image import Image
from ddp.elastic.images.leaves import OWN, Leaf
from ddp.groups import accelerator
from ddp.telemetry.coded import WrongType, WrongValue

# --- buckets of wrapped models ---------------------------------------------------------------------
#
# The buckets of models that are wrapped in our DistributedDataParallel, as part of a commit.
#
# DDP arranges its buckets after the first backward. Some process groups add in an order that depends on a bucket's
# size, and some communication hooks compress a bucket as a whole. So a job that goes on uses the buckets of the job
# before.


def wrapped(named: Mapping[str, Any]) -> dict[str, Any]:
    """The models with a reducer of ours."""
    return {name: value for name, value in named.items() if _reducer_of(value) is not None}


def _reducer_of(value: Any) -> Any:
    return getattr(getattr(value, "reducer", None), "core", None)


def bucket_plans_of(models: Mapping[str, Any]) -> dict[str, Any]:
    """The order of parameters in the buckets of the models that have arranged them."""
    found = {}
    for name, value in models.items():
        reducer = _reducer_of(value)
        if reducer.rebuilt:
            found[name] = {"order": list(reducer.agreed_order)}
    return found


def restore_bucket_plans(models: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Arrange the buckets as they were. Collective over the groups of the models."""
    for name, value in models.items():
        reducer, plan = _reducer_of(value), kept.get(name)
        if plan is None or not reducer.should_rebuild or len(plan["order"]) != len(reducer.parameters):
            continue
        reducer.rebuild(plan["order"])


# --- contents --------------------------------------------------------------------------------------

_BUCKETS = "buckets"  # of wrapped models
_OF_PARAMETER = re.compile(r"state\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Captured:
    skeleton: Any
    tensors: list[Any]
    paths: list[str]
    names: Callable[[], Names]  # of the parameters in optimizers; only commits to disk need them
    own: Any  # the skeleton of what belongs to this rank


def unwrap(value: Any) -> Any:
    """Remove a DDP wrapper: a commit contains the model, with the model's own names."""
    return value.module if isinstance(value, DistributedDataParallel) else value


class Contents:
    def __init__(self, named: dict[str, Any]) -> None:
        shared, self.own = own.sort_out(named)
        self._wrapped = wrapped(named)
        self.averagers = own.averagers(named)
        self.objects = {name: unwrap(value) for name, value in shared.items() if own.is_stateful(value)}
        self.fields = {name: value for name, value in shared.items() if name not in self.objects}
        for name, value in self.objects.items():
            _check_shareable(name, value)
        if self.averagers and leaves.part_of(list(self._templates().values()), (0, 1)):
            raise WrongType(
                f"cannot commit {type(self.averagers[0]).__name__} together with a model or an optimizer in shards: "
                "it lets each rank train a whole model of its own. Use one or the other"
            )

    def capture(self) -> Captured:
        tree = {
            "objects": {name: each.state_dict() for name, each in self.objects.items()},
            "fields": self.fields,
            _BUCKETS: bucket_plans_of(self._wrapped),
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
            {id(parameter): dcp.bare(name) for name, parameter in each.named_parameters()} for each in modules
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
        return leaves.part_of(list(self._templates().values()), (rank, size)) or (0, 1), self.fingerprint()

    def fingerprint(self) -> int:
        regions: list[Any] = [
            (path, leaves.leaf_of(each, path).region) for path, each in self._templates().items()
        ]
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
        return _Templates(self._templates(), parameters, copies.homes(self.objects))

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
            # A module copies the tensors; other objects keep them, so they need a copy.
            is_copied = isinstance(each, torch.nn.Module)
            each.load_state_dict(state if is_copied else copies.owned(state, home_of))
        self.fields.update((name, value) for name, value in copies.owned(tree["fields"]).items())
        restore_bucket_plans(self._wrapped, tree.get(_BUCKETS, {}))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_shareable(name: str, value: Any) -> None:
    """Raise if a state differs between ranks, and nothing tells how: then it cannot be resharded."""
    if "ZeroRedundancyOptimizer" in {each.__name__ for each in type(value).__mro__}:
        raise WrongType(
            f"cannot commit {name}: a ZeroRedundancyOptimizer is sharded, but its state does not describe the shards, "
            "so it cannot be restored on other ranks. Use FSDP2. Or call consolidate_state_dict() on all ranks, and "
            "then on rank 0 torch.save() the result of state_dict()"
        )


@dataclass(frozen=True, slots=True)
class _Templates:
    """The existing tensors that define the layout of restored ones."""

    modules: dict[str, torch.Tensor]
    parameters: dict[str, list[torch.Tensor]]  # of each optimizer, by the prefix of its paths
    homes: dict[str, torch.Tensor]  # that optimizers have now, by path

    def of(self, leaf: Leaf) -> torch.Tensor | None:
        found = self.modules.get(leaf.path)
        if found is not None:
            return found
        for prefix, parameters in self.parameters.items():
            number = _number_in(leaf.path, prefix)
            if number is not None and number < len(parameters):
                parameter = parameters[number]
                if tuple(parameter.shape) == leaf.shape:
                    return parameter
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
        if self._tree is None:
            self._tree = leaves.assemble(image.skeleton(), lambda number: _Ref(keys[number]))
        self.world_size = self.world_size or image.head.world_size
        for number, leaf in enumerate(image.layout.leaves):
            if leaf.is_own:
                continue
            if keys[number] not in self._found:
                self._found[keys[number]] = self._wanted(leaf, keys[number])
            piece = image.tensor(number)
            if piece is not None:
                self._found[keys[number]].filled.take(leaf.region, piece)

    def _wanted(self, leaf: Leaf, key: str) -> _Wanted:
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
            if wanted.home is not None:
                self._homes[id(result)] = wanted.home
                return result
            return leaves.with_sharding(result, wanted.template)

        made: dict[str, Any] = leaves.replaced(self._tree, tensor)
        return made


@dataclass(frozen=True, slots=True)
class _Wanted:
    filled: leaves.Filled
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


# --- contents from a checkpoint of another program -------------------------------------------------
#
# Begin from a checkpoint of torch.distributed.checkpoint that another program has written.
#
# Programs give different names to the same things: `model.layers.0.weight`, `layers.0.weight`,
# `optimizer_0.state...`. So each object is searched for by what it contains: a module by the names of its tensors,
# an optimizer by the names or numbers of its parameters. Values and other objects are searched for under their own
# name.

log = logging.getLogger("ddp.elastic")
_STATE, _GROUPS = "state.", "param_groups."


def load_foreign(
    checkpoint: Checkpoint, objects: dict[str, Any], fields: dict[str, Any], names: Names
) -> None:
    """Load everything that the checkpoint has; a module must be there. Each rank reads its own regions."""
    missing = []
    for name, each in objects.items():
        if isinstance(each, torch.nn.Module):
            each.load_state_dict(_module_state(checkpoint, name, each))
        elif isinstance(each, torch.optim.Optimizer):
            state = _optimizer_state(checkpoint, name, each, names.get(name))
            if state is None:
                missing.append(name)
            else:
                each.load_state_dict(state)
        else:
            try:
                each.load_state_dict(checkpoint.tree(name))
            except KeyError:
                missing.append(name)
    for name in fields:
        try:
            fields[name] = checkpoint.tree(name)
        except KeyError:
            missing.append(name)
    if missing:
        log.warning(
            "ddp.elastic: %s has no %s; these stay as they are", checkpoint.name, ", ".join(sorted(missing))
        )


def _module_state(checkpoint: Checkpoint, name: str, module: torch.nn.Module) -> dict[str, Any]:
    templates = {key: each for key, each in module.state_dict().items() if isinstance(each, torch.Tensor)}
    bare = {key: dcp.bare(key) for key in templates}
    known = checkpoint.table.tensors
    first = next(iter(bare.values()), "")
    prefixes = {key.removesuffix(first) for key in known if key == first or key.endswith(f".{first}")}
    fitting = [each for each in prefixes if all(f"{each}{short}" in known for short in bare.values())]
    if not fitting:
        closest = max(
            prefixes, key=lambda each: sum(f"{each}{short}" in known for short in bare.values()), default=""
        )
        lacking = [short for short in bare.values() if f"{closest}{short}" not in known]
        raise CheckpointError(
            f"{checkpoint.name} does not fit {name}: it lacks {len(lacking)} of its {len(bare)} tensors, for example "
            f"{lacking[0] if lacking else first}. Use the same model"
        )
    prefix = min(fitting, key=lambda each: (each != f"{name}.", len(each), each))
    loaded = {key: _like(checkpoint, f"{prefix}{bare[key]}", each) for key, each in templates.items()}
    return module.state_dict() | loaded


def _like(checkpoint: Checkpoint, key: str, template: torch.Tensor) -> torch.Tensor:
    """A tensor with the sharding of the template."""
    leaf = leaves.leaf_of(template, key)
    entry = checkpoint.table.tensors[key]
    if entry.shape != leaf.shape:
        raise CheckpointError(
            f"{checkpoint.name} does not fit: the shape of {key} is {entry.shape} there, but {leaf.shape} here. "
            "Use the same model"
        )
    return leaves.with_sharding(checkpoint.tensor(key, leaf.region), template)


def _optimizer_state(
    checkpoint: Checkpoint, name: str, optimizer: torch.optim.Optimizer, names: tuple[str, ...] | None
) -> dict[str, Any] | None:
    parameters = parameters_of(optimizer)
    numbers = {str(number): number for number in range(len(parameters))}
    numbers |= {} if names is None else {each: number for number, each in enumerate(names)}
    by_prefix: dict[str, dict[tuple[int, str], str]] = {}
    for key in (*checkpoint.table.tensors, *checkpoint.table.values):
        prefix, found, rest = _split_key(key, _STATE)
        if found and (parsed := _parameter_in(rest, numbers)) is not None:
            by_prefix.setdefault(prefix, {})[parsed] = key
    if not by_prefix:
        return None
    prefix = max(by_prefix, key=lambda each: (each == f"{name}.", len(by_prefix[each]), each))
    state: dict[int, dict[str, Any]] = {}
    for (number, slot), key in by_prefix[prefix].items():
        state.setdefault(number, {})[slot] = _slot(checkpoint, key, parameters[number])
    groups = optimizer.state_dict()["param_groups"]
    for index, group in enumerate(groups):
        first = names[group["params"][0]] if names is not None and group["params"] else str(index)
        for option in group:
            for key in (f"{prefix}{_GROUPS}{index}.{option}", f"{prefix}{_GROUPS}{first}.{option}"):
                if option != "params" and (key in checkpoint.table.values or key in checkpoint.table.tensors):
                    group[option] = checkpoint.tree(key)
    return {"state": state, "param_groups": groups}


def _slot(checkpoint: Checkpoint, key: str, parameter: torch.Tensor) -> Any:
    if key in checkpoint.table.values:
        return checkpoint.value(key)
    if checkpoint.table.tensors[key].shape == tuple(parameter.shape):
        return _like(checkpoint, key, parameter)
    return checkpoint.tensor(key)


def _split_key(key: str, word: str) -> tuple[str, bool, str]:
    """What is before the word, whether it is there as the beginning of a step of the path, and what follows."""
    if key.startswith(word):
        return "", True, key[len(word) :]
    prefix, found, rest = key.partition(f".{word}")
    return f"{prefix}.", bool(found), rest


def _parameter_in(rest: str, numbers: dict[str, int]) -> tuple[int, str] | None:
    """The parameter at the beginning of `layers.0.weight.exp_avg`, and the name of its state."""
    name, dot, slot = rest.rpartition(".")
    return (numbers[name], slot) if dot and name in numbers else None
