"""Wrapped models (DistributedDataParallel, torch's and ours) start anew with the groups that were formed anew.

A replacement has just wrapped its model. So the survivors return to the same point: the first plan of buckets, no
observed order, no backward in progress. Gradients are dropped, also those that were accumulated under `no_sync()`: the
resume goes back to a commit, which has none.

torch's class gets a new reducer, as when it is unpickled. Its `_update_process_group` keeps buckets that were rebuilt,
which a replacement does not have. A class of ours registers a function of its own (`renew_with`).

The state of a communication hook, such as the error feedback of PowerSGD, belongs to a rank and is lost with it. Ranks
with different states would send different amounts. So the state starts anew on all ranks, as after a restart.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp.groups import sharded_models, successors
from ddp.groups.reform_plan import CannotReform
from ddp.telemetry import torch_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """Find wrappers that nobody noted: made before, or by `copy.deepcopy`. It looks at all objects, so only once."""
    if _searched or not _watching:
        return
    _searched.append(True)
    torchs = sys.modules.get(_TORCHS_MODULE)
    if torchs is not None:
        kinds = {*_with_subclasses(torchs.DistributedDataParallel), *sharded_models.flat_kinds()}
        for each in [each for each in gc.get_objects() if type(each) in kinds]:
            _note(each)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    subclasses: list[type[Any]] = kind.__subclasses__()
    for each in subclasses:
        yield from _with_subclasses(each)


def remember() -> None:
    """Note what cannot be computed later: where torch's PowerSGD began to draw random numbers, and switches of FSDP."""
    sharded_models.remember()
    _seeds.clear()
    for wrapper in list(_live):
        for _hook, state in vars(wrapper).get("_comm_hooks", ()):
            if type(state).__name__ == "PowerSGDState":
                _seeds[id(state)] = (state, state.rng.get_state())


def obstacle() -> str:
    """Say why a model of this process cannot start anew; "" if this is not known yet."""
    return sharded_models.obstacle()


def _note(module: Any, *_submodule: Any) -> None:
    if _is_wrapper(type(module)):
        _live.add(module)
    else:
        sharded_models.note_if_flat(type(module))


def _is_wrapper(kind: type) -> bool:
    torchs = sys.modules.get(_TORCHS_MODULE)
    return torchs is not None and issubclass(kind, torchs.DistributedDataParallel)


def renew_all() -> None:
    """Let all wrapped models start anew. CannotReform: one of them cannot."""
    sharded_models.renew()
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
    """Let the state of a hook start anew. CannotReform: it is not known how."""
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
        raise CannotReform(f"it is not known how the state of torch's hook {name} starts anew")
