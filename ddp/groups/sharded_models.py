"""Models in shards (FSDP2, HSDP) go on after an interrupted step, with the groups that were formed anew.

Theory of operation
-------------------
FSDP2 gathers the parameters of a layer before they are used, frees them, and reduces gradients behind the backward. An
interrupted step leaves all of that half done. torch can return a model to the point between two steps:
`FSDPModule.reset_iter_state`. It waits for what is in flight, which a group that was aborted never finishes, and it
keeps gradients that were accumulated without synchronization. So both are dropped here.

The shards themselves come from the resume. A replacement has made its model just now, so what the script sets between
micro-batches (`set_requires_gradient_sync`, ...) returns to what it was when this process began to train.

A rank holds the shard of its place, and the device mesh has the ranks as numbers. So a model in shards goes on only in
the same place of a world of the same size.

torch has a table of the modules that FSDP2 shards. Modules of FSDP1 are in no table. A search of all objects takes
tens or hundreds of milliseconds, and torch.compile imports FSDP1 for jobs without such a model too. So a survivor makes
it only if such a model may exist: they are noted when they are made, and those that were made before are found by the
search for wrapped models (`ddp.groups.wrappers`).
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddp.groups.reform_plan import CannotReform, Place
from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FSDP_MODULE = "torch.distributed.fsdp"
_SHARDED, _FLAT = "FSDPModule", "FullyShardedDataParallel"
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


@dataclass(frozen=True, slots=True)
class _Known:
    """The place in which the models were sharded, and what the script has set for them."""

    place: Place
    switches: WeakKeyDictionary[Any, dict[str, bool]]  # by the parameter group of FSDP2
    last_backward: WeakKeyDictionary[Any, bool]  # by its state


_known: list[_Known] = []
_flat_noted: list[bool] = []


def remember() -> None:
    """Note the place of this process, and the switches of its models: training begins now."""
    _known.clear()
    modules = in_shards()
    # Only then: the question imports torch's FSDP, which a script without it should not wait for.
    states = _states(modules) if modules and torch_api.has(torch_names.RESET_OF_FSDP) else []
    if states:
        known = _Known(
            Place(dist.get_rank(), dist.get_world_size()), WeakKeyDictionary(), WeakKeyDictionary()
        )
        for state in states:
            known.last_backward[state] = state._state_ctx.is_last_backward
            for group in state._fsdp_param_groups:
                known.switches[group] = {name: getattr(group, name) for name in _SWITCHES}
        _known.append(known)


def renew() -> None:
    """Return all models in shards to the point between two steps. CannotReform: one of them cannot."""
    modules = _modules()
    if not modules:
        return
    if why := _obstacle_of(modules):
        raise CannotReform(why)
    _check_place(type(modules[0]).__name__)
    states = _states(modules)
    for state in states:
        for group in state._fsdp_param_groups:
            group._all_gather_result = None
    for module in modules:
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()
    for state in states:
        _drop_gradients(state)
        _set_switches(state)


def obstacle() -> str:
    """Say why the models that this process has now cannot go on after a failure; "" if they can."""
    modules = _modules()
    return _obstacle_of(modules) if modules else ""


def _modules() -> list[Any]:
    return [*in_shards(), *(_found(flat_kinds()) if _flat_noted else ())]


def _obstacle_of(modules: Iterable[Any]) -> str:
    if any(_FLAT in {base.__name__ for base in type(each).__mro__} for each in modules):
        return (
            f"the model is sharded ({_FLAT}): FSDP1 cannot go on after a step that was interrupted, because parameters "
            "may be gathered and gradients half reduced. Use fully_shard (FSDP2)"
        )
    if not torch_api.has(torch_names.RESET_OF_FSDP):
        return (
            f"the model is sharded (fully_shard): FSDP2 of torch {torch.__version__} cannot go on after a step that "
            "was interrupted. torch 2.13 and later can"
        )
    return ""


def _check_place(kind: str) -> None:
    now = Place(dist.get_rank(), dist.get_world_size())
    if _known and (before := _known[0].place) != now:
        raise CannotReform(
            f"the model is sharded ({kind}), and this process has the shard of rank {before.rank} of {before.size}. It "
            f"is rank {now.rank} of {now.size} now"
        )


def _drop_gradients(state: Any) -> None:
    """Those of shards, and those that were accumulated without synchronization."""
    for group in state._fsdp_param_groups:
        for each in group.fsdp_params:
            each.sharded_param.grad = None
            each.unsharded_accumulated_grad = None
            if (gathered := getattr(each, torch_names.GATHERED, None)) is not None:
                gathered.grad = None


def _set_switches(state: Any) -> None:
    if not _known:
        return
    for group in state._fsdp_param_groups:
        for name, value in _known[0].switches.get(group, {}).items():
            setattr(group, name, value)
    state._state_ctx.is_last_backward = _known[0].last_backward.get(state, True)


# --- finding them ----------------------------------------------------------------------------------------


def _states(modules: Iterable[Any]) -> list[Any]:
    """The states of these modules. Several modules may have one together."""
    return list({id(state): state for state in (each._get_fsdp_state() for each in modules)}.values())


def in_shards() -> list[Any]:
    """All modules to which `fully_shard` was applied."""
    kinds = _sharded_kinds()
    if not kinds or not torch_api.has(torch_names.STATES_OF_MODULES):
        return _found(kinds)
    return [each for each in list(torch_api.get(torch_names.STATES_OF_MODULES)) if type(each) in kinds]


def _found(kinds: set[type[Any]]) -> list[Any]:
    """All modules of these classes that this process has. It looks at all objects, unless there is no class."""
    return [each for each in gc.get_objects() if type(each) in kinds] if kinds else []


def _sharded_kinds() -> set[type[Any]]:
    """The classes of modules to which `fully_shard` was applied, also before this library was imported."""
    kind = getattr(sys.modules.get(_FSDP_MODULE), _SHARDED, None)
    return set() if kind is None else {each for each in _below(kind) if issubclass(each, torch.nn.Module)}


def flat_kinds() -> set[type[Any]]:
    """The classes of FSDP1. They exist as soon as its module was imported."""
    kind = getattr(sys.modules.get(_FSDP_MODULE), _FLAT, None)
    return set() if kind is None else {kind, *_below(kind)}


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    subclasses: list[type[Any]] = kind.__subclasses__()
    for each in subclasses:
        yield each
        yield from _below(each)


def note_if_flat(kind: type[Any]) -> None:
    """Note that a module of this class was made, if it is one of FSDP1. It, or a copy of it, may exist from now on."""
    flat = getattr(sys.modules.get(_FSDP_MODULE), _FLAT, None)
    if flat is not None and issubclass(kind, flat):
        _flat_noted[:] = [True]
