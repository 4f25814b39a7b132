"""Wrapped models (DistributedDataParallel, torch's and ours) start again with the groups that were formed again.

A replacement has just wrapped its model. So the survivors return to the same point: the first plan of buckets, no
observed order, no backward in progress. Gradients are dropped, also those that were accumulated under `no_sync()`: the
resume goes back to a commit, which has none.

torch's class gets a new reducer, as when it is unpickled. Its `_update_process_group` keeps buckets that were rebuilt,
which a replacement does not have. A class of ours registers a function of its own (`renew_with`).

The state of a communication hook, such as the error feedback of PowerSGD, belongs to a rank and is lost with it. Ranks
with different states would send different amounts. So the state starts again on all ranks, as after a restart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddp.groups import successors
from ddp.groups.rank_info import CannotReform, WorldPlace
from ddp.telemetry import torch_api, torch_names
from ddp.telemetry.observing import instances_of, with_subclasses

# --- models whose parameters are DTensors ----------------------------------------------------------
#
# Models in shards (FSDP2, HSDP) go on after an interrupted step, with the groups that were formed again.
#
# Theory of operation
# -------------------
# FSDP2 gathers the parameters of a layer before they are used, frees them, and reduces gradients behind the
# backward. An interrupted step leaves all of that half done. torch can return a model to the point between two
# steps: `FSDPModule.reset_iter_state`. It waits for what is in flight, which a group that was aborted never
# finishes, and it keeps gradients that were accumulated without synchronization. So both are dropped here.
#
# The shards themselves come from the resume. A replacement has made its model just now, so what the script sets
# between micro-batches (`set_requires_gradient_sync`, ...) returns to what it was when this process began to train.
#
# A rank holds the shard of its place, and the device mesh has the ranks as numbers. So a model in shards goes on
# only in the same place of a world of the same size.
#
# torch has a table of the modules that FSDP2 shards. Modules of FSDP1 are in no table. A search of all objects
# takes tens or hundreds of milliseconds, and torch.compile imports FSDP1 for jobs without such a model too. So a
# survivor makes it only if such a model may exist: they are noted when they are made, and those that were made
# before are found by the search for wrapped models (`ddp.groups.wrappers`).

_FSDP_MODULE = "torch.distributed.fsdp"
_SHARDED, _FLAT = "FSDPModule", "FullyShardedDataParallel"
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


@dataclass(frozen=True, slots=True)
class _Known:
    """The place in which the models were sharded, and what the script has set for them."""

    place: WorldPlace
    switches: WeakKeyDictionary[Any, dict[str, bool]]  # by the parameter group of FSDP2
    last_backward: WeakKeyDictionary[Any, bool]  # by its state


_known: list[_Known] = []
_flat_noted: list[bool] = []


def remember_shards() -> None:
    """Note the place of this process, and the switches of its models: training begins now."""
    _known.clear()
    modules = in_shards()
    # Only then: the question imports torch's FSDP, which a script without it should not wait for.
    states = _states(modules) if modules and torch_api.has(torch_names.RESET_OF_FSDP) else []
    if states:
        known = _Known(
            WorldPlace(dist.get_rank(), dist.get_world_size()), WeakKeyDictionary(), WeakKeyDictionary()
        )
        for state in states:
            known.last_backward[state] = state._state_ctx.is_last_backward
            for group in state._fsdp_param_groups:
                known.switches[group] = {name: getattr(group, name) for name in _SWITCHES}
        _known.append(known)


def renew_shards() -> None:
    """Return all models in shards to the point between two steps. CannotReform: one of them cannot."""
    modules = _modules()
    if not modules:
        return
    if why := _obstacle_of(modules):
        raise CannotReform(why)
    kind = type(modules[0]).__name__
    now = WorldPlace(dist.get_rank(), dist.get_world_size())
    if _known and (before := _known[0].place) != now:
        raise CannotReform(
            f"the model is sharded ({kind}), and this process has the shard of rank {before.rank} of {before.size}. It "
            f"is rank {now.rank} of {now.size} now"
        )
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


def obstacle_of_shards() -> str:
    """Say why the models that this process has now cannot go on after a failure; "" if they can."""
    modules = _modules()
    return _obstacle_of(modules) if modules else ""


def _modules() -> list[Any]:
    return [*in_shards(), *(instances_of(flat_kinds()) if _flat_noted else ())]


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
        return instances_of(kinds)
    return [each for each in list(torch_api.get(torch_names.STATES_OF_MODULES)) if type(each) in kinds]


def _sharded_kinds() -> set[type[Any]]:
    """The classes of modules to which `fully_shard` was applied, also before this library was imported."""
    kind = getattr(sys.modules.get(_FSDP_MODULE), _SHARDED, None)
    return (
        set()
        if kind is None
        else {each for each in with_subclasses(kind) if issubclass(each, torch.nn.Module)}
    )


def flat_kinds() -> set[type[Any]]:
    """The classes of FSDP1. They exist as soon as its module was imported."""
    kind = getattr(sys.modules.get(_FSDP_MODULE), _FLAT, None)
    return set() if kind is None else set(with_subclasses(kind))


def note_if_flat(kind: type[Any]) -> None:
    """Note that a module of this class was made, if it is one of FSDP1. It, or a copy of it, may exist from now on."""
    flat = getattr(sys.modules.get(_FSDP_MODULE), _FLAT, None)
    if flat is not None and issubclass(kind, flat):
        _flat_noted[:] = [True]


# --- wrappers --------------------------------------------------------------------------------------

_TORCHS_MODULE = "torch.nn.parallel.distributed"

_live: weakref.WeakSet[Any] = weakref.WeakSet()
_watching: list[Any] = []
_searched: list[bool] = []
_seeds: dict[int, tuple[Any, Any]] = {}  # by the identity of the state, which has no weak references
_renewers: list[tuple[type, Callable[[Any], None]]] = []


def renew_with(kind: type, renew: Callable[[Any], None]) -> None:
    """Let `renew(wrapper)` renew the wrappers of this class."""
    _renewers.insert(0, (kind, renew))


def watch() -> None:
    """Note every model that is wrapped from now on, and find those that were wrapped before. Once in a process."""
    if not _watching:
        watch_from_start()
        find_unnoticed()


def watch_from_start() -> None:
    """Note every model that is wrapped from now on. No model is wrapped yet."""
    register = torch.nn.modules.module.register_module_module_registration_hook
    _watching.append(register(_note))


def find_unnoticed() -> None:
    """Find wrappers that were not noted: made before, or by `copy.deepcopy`. It looks at all objects, so only once."""
    if _searched or not _watching:
        return
    _searched.append(True)
    torchs = sys.modules.get(_TORCHS_MODULE)
    if torchs is not None:
        for each in instances_of({torchs.DistributedDataParallel, *flat_kinds()}):
            _note(each)


def remember() -> None:
    """Note what cannot be computed later: where torch's PowerSGD began to draw random numbers, and switches of FSDP."""
    remember_shards()
    _seeds.clear()
    for wrapper in list(_live):
        for _hook, state in vars(wrapper).get("_comm_hooks", ()):
            if type(state).__name__ == "PowerSGDState":
                _seeds[id(state)] = (state, state.rng.get_state())


def obstacle() -> str:
    """Say why a model of this process cannot start again; "" if this is not known yet."""
    return obstacle_of_shards()


def _note(module: Any, *_submodule: Any) -> None:
    if _is_wrapper(type(module)):
        _live.add(module)
    else:
        note_if_flat(type(module))


def _is_wrapper(kind: type) -> bool:
    torchs = sys.modules.get(_TORCHS_MODULE)
    return torchs is not None and issubclass(kind, torchs.DistributedDataParallel)


def renew_all() -> None:
    """Let all wrapped models start again. CannotReform: one of them cannot."""
    renew_shards()
    for wrapper in list(_live):
        if "reducer" not in vars(wrapper):
            continue  # its constructor has raised
        drop_gradients(wrapper)
        if wrapper.mixed_precision is not None:
            _return_to_full_precision(wrapper)
        renew = next((renew for kind, renew in _renewers if isinstance(wrapper, kind)), _renew_torchs)
        renew(wrapper)


def drop_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _return_to_full_precision(wrapper: Any) -> None:
    """Undo what a forward with mixed precision has done: it lets parameters be copies of low precision."""
    for parameter in wrapper.module.parameters():
        full = getattr(parameter, torch_names.FULL_PRECISION, None)
        if full is None:  # DDP ignores this parameter
            continue
        _accumulator, hook = parameter.__dict__.pop(torch_names.HOOK_OF_FORWARD, (None, None))
        if hook is not None:
            hook.remove()
        parameter.data = full
    wrapper._submodule_to_event.clear()


# --- torch's class ---------------------------------------------------------------------------------------


def _renew_torchs(wrapper: Any) -> None:
    hooks = list(wrapper._comm_hooks)
    _check(wrapper, hooks)
    wrapper.process_group = successors.of(wrapper.process_group)
    wrapper.reducer._remove_autograd_hooks()
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if wrapper._delay_grad_buffer is not None:
        wrapper._delay_grad_buffer.zero_()
    wrapper._comm_hooks = []
    for hook, state in hooks:
        renew_hook_state(state)
        wrapper.register_comm_hook(state, hook)
    if wrapper.mixed_precision is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(wrapper.mixed_precision.param_dtype)


def _check(wrapper: Any, hooks: list[Any]) -> None:
    unknown = wrapper._get_ddp_logging_data().get("comm_hook", "") and not hooks
    features = {
        "a built-in communication hook": bool(unknown),
        "an optimizer in the backward": any(isinstance(state, weakref.ref) for _, state in hooks),
        "torch.compile's reducer in Python": bool(getattr(wrapper, torch_names.PYTHON_REDUCER.name, False)),
    }
    for feature, is_used in features.items():
        if is_used:
            raise CannotReform(
                f"torch's DistributedDataParallel with {feature} keeps a state of an interrupted step that cannot be "
                "reset"
            )


# --- states of communication hooks -----------------------------------------------------------------------


def renew_hook_state(state: Any) -> None:
    """Let the state of a hook start again. CannotReform: it is not known how."""
    if state is None or isinstance(state, dist.ProcessGroup | weakref.ref):
        return
    start_anew = getattr(state, "start_anew", None)
    if callable(start_anew):
        start_anew()
    elif type(state).__module__.startswith("torch.distributed.algorithms.ddp_comm_hooks."):
        _renew_torchs_state(state)
    else:
        raise CannotReform(
            f"the state of a communication hook ({type(state).__qualname__}) belongs to a rank, and is lost with it. "
            "Give it a method start_anew(), which returns it to its first step"
        )


def _renew_torchs_state(state: Any) -> None:
    """Return the state of torch's PowerSGD or post-local SGD to what its constructor makes."""
    name = type(state).__name__
    if name == "PowerSGDState":
        if id(state) not in _seeds:
            raise CannotReform("the hook of PowerSGD was registered inside the function that state.run calls")
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()
        state.rng.set_state(_seeds[id(state)][1])
        state.iter = 0
        state.total_numel_before_compression = state.total_numel_after_compression = 0
    elif name == "PostLocalSGDState":
        state.iter = 0
    elif name == "_AllreduceUpcastHookState":  # of mixed precision
        state.wait_for_stream_enqueued = False
    else:
        raise CannotReform(f"it is not known how the state of torch's hook {name} starts again")
