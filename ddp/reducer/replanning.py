"""New buckets for a module with parameters that were unfrozen after wrapping.

All ranks must unfreeze the same parameters before the same forward. A rank that has unfrozen some cannot know whether
the others have. If they have not, they begin the collectives of an ordinary step, and a collective of this rank would
be mixed up with them. So the ranks first meet at the store of the job: each writes what it has unfrozen, and waits for
what the others write. That costs something only when parameters are unfrozen.

The reducer stays the same object, because diagnostics hold it. It starts over with the new list of parameters, as if
the module had been wrapped now. Their values are those of rank 0 already: frozen parameters are broadcast at
construction too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp.groups import registry, stores
from ddp.reducer import errors, plan, unowned_gradients
from ddp.reducer.gradient_hooks import GradientHooks
from ddp.reducer.unused import GraphSearch
from ddp.telemetry import torch_api

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed import ProcessGroup

    from ddp.reducer.reducer import Reducer

REPLANNED = "_replanned"  # set in a wrapper whose parameters are no longer those of its construction
_meetings: dict[str, int] = {}  # how often the ranks of a group have met


def obstacle(wrapper: Any) -> str:
    """Return the feature that does not permit a change of the parameters, or ""."""
    core: Reducer = wrapper.reducer.core
    features = {
        "strict=True": core.settings.strict,
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(wrapper._delay_all_reduce_params),
        "an optimizer in the backward, such as ShardedOptimizer": core.sender.takes_gradients,
        "a logical world": core.sender.partial_sums is not None,
        "join()": core.sender.joins,
        "a backward that is still running": core.within_own_backward(),
    }
    return next((name for name, is_on in features.items() if is_on), "")


def replan(wrapper: Any, unfrozen: Sequence[str]) -> None:
    """Average the unfrozen parameters too, from the next backward on. All ranks do it before the same forward."""
    core: Reducer = wrapper.reducer.core
    if found := obstacle(wrapper):
        raise core.setup.record_error(errors.not_replanned(unfrozen, core.rank, found))
    core.check_finished()
    parameters, sparse = wrapper._build_params_for_reducer()
    named = wrapper._build_debug_param_to_name_mapping(parameters)
    names = [named[i].removeprefix(".") for i in range(len(parameters))]
    _meet(core, unfrozen, plan.fingerprint(names, sparse))
    _replace_parameters(core, parameters, names, sparse)
    wrapper.__dict__[REPLANNED] = True
    for _hook, state in wrapper._comm_hooks:
        _start_anew(state)
    wrapper.reducer.write_log(wrapper.logger)


def _meet(core: Reducer, unfrozen: Sequence[str], fingerprint: int) -> None:
    """Return when all ranks have unfrozen the same. Raise if one has unfrozen something else, or nothing."""
    group = core.sender.group
    if group.size() == 1:
        return
    name = str(group.group_name)
    _meetings[name] = number = _meetings.get(name, 0) + 1
    store, key = torch_api.default_store(), f"ddp/unfrozen/{name}/{number}"
    keys = [f"{key}/{rank}" for rank in range(group.size())]
    store.set(keys[core.rank], json.dumps([fingerprint, list(unfrozen)]))
    timeout_s = _timeout_s(group)
    try:
        stores.await_keys(store, keys, timeout_s, lambda: "")
    except TimeoutError:
        absent = [rank for rank, each in enumerate(keys) if not store.check([each])]
        raise core.setup.record_error(errors.unfrozen_alone(unfrozen, core.rank, absent, timeout_s)) from None
    for rank, each in enumerate(keys):
        number_there, theirs = json.loads(store.get(each))
        if number_there != fingerprint:
            raise core.setup.record_error(errors.unfrozen_elsewhere(unfrozen, core.rank, theirs, rank))


def _timeout_s(group: ProcessGroup) -> float:
    return (registry.timeout_of(group) or dist.default_pg_timeout).total_seconds()


def _replace_parameters(
    core: Reducer, parameters: Sequence[torch.Tensor], names: Sequence[str], sparse: Sequence[bool]
) -> None:
    setup = core.setup
    setup.arrivals.take()
    core.hooks.remove()
    core.parameters[:], core.names[:] = parameters, names  # in place: `setup` has the same lists
    setup.expected = [1] * len(parameters)
    setup.used_between = set()
    core.sender.replace_parameters(parameters, names, sparse)
    core.hooks = GradientHooks(parameters, setup.arrivals)
    core.graph = GraphSearch(core.hooks.accumulators)
    if core.sender.group.size() > 1:
        unowned_gradients.own(core, parameters)
    core.forget()
    core.start_over()


def _start_anew(state: Any) -> None:
    """Drop what the state of a hook keeps for each bucket: the buckets are others now."""
    start_anew = getattr(state, "start_anew", None)
    if callable(start_anew):
        start_anew()
    elif type(state).__name__ == "PowerSGDState":
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()
