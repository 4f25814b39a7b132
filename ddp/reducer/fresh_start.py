"""Return a wrapped model of ours to the state after its construction, with groups that were formed anew.

A replacement has constructed its model just now. All ranks must have the same plan of buckets, so the survivors return
to the first plan as well. The reducer stays the same object: the diagnostics and the optimizer hold it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp.groups import successors, wrappers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from ddp.reducer.reducer import Reducer


def renew_wrapper(wrapper: Any) -> None:
    """Let a `DistributedDataParallel` of ours start anew. CannotReform: the state of its hook cannot."""
    core: Reducer = wrapper.reducer.core
    groups = tuple(successors.of(group) for group in core.settings.groups)
    if wrapper.__dict__.get("_groups"):
        wrapper.__dict__["_groups"] = groups
    wrapper.process_group = groups[0]
    start_anew(core, groups)
    wrapper._has_rebuilt_buckets = False
    wrapper._static_graph_delay_allreduce_enqueued = (
        False  # by which torch averages the first step at its end
    )
    wrapper.__dict__["_delayed_is_sent"] = False
    if wrapper._delay_grad_buffer is not None:
        wrapper._delay_grad_buffer.zero_()
    for _hook, state in wrapper._comm_hooks:
        wrappers.renew_hook_state(state)


def start_anew(reducer: Reducer, groups: Sequence[ProcessGroup]) -> None:
    """Forget the last backward and everything that was observed, and use these groups."""
    reducer.settings = replace(reducer.settings, groups=tuple(groups))
    reducer.sender.start_anew(reducer.settings)
    reducer.start_over()
