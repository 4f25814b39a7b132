"""Return a wrapped model of ours to the state after its construction, with groups that were formed anew.

A replacement has constructed its model just now. All ranks must have the same plan of buckets, so the survivors return
to the first plan as well. The reducer stays the same object: the diagnostics and the optimizer hold it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp.groups import successors, wrappers
from ddp.groups.reform_plan import CannotReform
from ddp.reducer import replanning, unowned_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from ddp.reducer.reducer import Reducer


def renew(wrapper: Any) -> None:
    """Let a `DistributedDataParallel` of ours start anew. CannotReform: the state of its hook cannot."""
    if wrapper.__dict__.get(replanning.REPLANNED):
        raise CannotReform(
            "parameters were unfrozen after wrapping, and a replacement has wrapped its model without them"
        )
    core: Reducer = wrapper.reducer.core
    groups = tuple(successors.of(group) for group in core.settings.groups)
    if wrapper.__dict__.get("_groups"):
        wrapper.__dict__["_groups"] = groups
    wrapper.process_group = groups[0]
    start_anew(core, groups)
    wrapper._has_rebuilt_buckets = False
    wrapper.__dict__["_delayed_is_sent"] = False
    if wrapper._delay_grad_buffer is not None:
        wrapper._delay_grad_buffer.zero_()
    for _hook, state in wrapper._comm_hooks:
        wrappers.renew_hook_state(state)


def start_anew(reducer: Reducer, groups: Sequence[ProcessGroup]) -> None:
    """Forget the last backward and everything that was observed, and use these groups."""
    settings = replace(reducer.settings, groups=tuple(groups))
    setup = reducer.setup
    setup.arrivals.take()
    reducer.settings = setup.settings = settings
    setup.rank = groups[0].rank()
    setup.expected = [1] * len(reducer.parameters)
    setup.trust_graph = True
    setup.used_between = set()
    setup.partly_averaged, setup.failed_tasks = (), frozenset()
    reducer.sender.start_anew(settings)
    reducer.forget()
    reducer.start_over()
    if groups[0].size() > 1 and not unowned_gradients.is_owner(reducer):
        unowned_gradients.own(reducer, reducer.parameters)
