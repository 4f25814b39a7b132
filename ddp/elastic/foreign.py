"""Begin from a checkpoint of torch.distributed.checkpoint that another program has written.

Programs give different names to the same things: `model.layers.0.weight`, `layers.0.weight`, `optimizer_0.state...`. So
each object is searched for by what it contains: a module by the names of its tensors, an optimizer by the names or
numbers of its parameters. Values and other objects are searched for under their own name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import dcp_keys, leaves
from ddp.elastic.checkpoint import Checkpoint, CheckpointError
from ddp.elastic.contents import parameters_of
from ddp.elastic.shares import SharedOut

if TYPE_CHECKING:
    from ddp.elastic.dcp_keys import Names

log = logging.getLogger("ddp.elastic")
_STATE, _GROUPS = "state.", "param_groups."


def load(checkpoint: Checkpoint, objects: dict[str, Any], fields: dict[str, Any], names: Names) -> None:
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
    bare = {key: dcp_keys.bare(key) for key in templates}
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
        prefix, found, rest = _split(key, _STATE)
        if found and (parsed := _parameter_in(rest, numbers)) is not None:
            by_prefix.setdefault(prefix, {})[parsed] = key
    if not by_prefix:
        return None
    prefix = max(by_prefix, key=lambda each: (each == f"{name}.", len(by_prefix[each]), each))
    state: dict[int, dict[str, Any]] = {}
    for (number, slot), key in by_prefix[prefix].items():
        state.setdefault(number, {})[slot] = _slot(checkpoint, key, parameters[number])
    groups = (
        optimizer.numbered_groups()
        if isinstance(optimizer, SharedOut)
        else optimizer.state_dict()["param_groups"]
    )
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


def _split(key: str, word: str) -> tuple[str, bool, str]:
    """What is before the word, whether it is there as the beginning of a step of the path, and what follows."""
    if key.startswith(word):
        return "", True, key[len(word) :]
    prefix, found, rest = key.partition(f".{word}")
    return f"{prefix}.", bool(found), rest


def _parameter_in(rest: str, numbers: dict[str, int]) -> tuple[int, str] | None:
    """The parameter at the beginning of `layers.0.weight.exp_avg`, and the name of its state."""
    name, dot, slot = rest.rpartition(".")
    return (numbers[name], slot) if dot and name in numbers else None
