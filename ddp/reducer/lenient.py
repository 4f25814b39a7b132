"""What torch's class refuses, or gets wrong without a word, although the average can be right.

It is averaged here by default. With `strict=True` it is what torch documents.

- A parameter without a gradient on this rank counts as zero. `.grad` stays None if no rank has a gradient of it.
  With `strict=True` the next forward raises.
- The forward did not run through the wrapper (`module.method(x)`). No output tells when such a backward begins, and
  which parameters it will reach. So everything is sent at its end. With `strict=True` it raises there.
- A backward inside `no_sync()` keeps its gradients on this rank, also if its forward ran outside. torch's class asks
  the flag in the forward only. With `strict=True` so does ours.
- A parameter that is unfrozen after wrapping: `replanning`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ddp.reducer import rpc_context
from ddp.telemetry.name_list import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp.reducer.reducer import Reducer
    from ddp.reducer.round import Setup

_log = logging.getLogger("ddp")


def accept_lacking(setup: Setup, lacking: Sequence[int]) -> None:
    """Raise for parameters without a gradient in the previous backward, or say once what they cost."""
    if setup.settings.strict or setup.static_graph:
        raise setup.unfinished(list(lacking))
    if not setup.said_lacking:
        setup.said_lacking = True
        _log.warning(
            "rank %d computed no gradient of %s in a backward pass. The averages are right, but the buckets with these "
            "parameters, and all later ones, are sent only when the backward pass ends. find_unused_parameters=True "
            "sends them earlier; so does static_graph=True, if every step leaves out the same parameters. To get an "
            "error instead, set strict=True",
            setup.rank,
            listed(setup.names_of(lacking)),
        )


def left_local(reducer: Reducer) -> bool:
    """Whether this backward runs inside `no_sync()`. If so, drop the round of its forward."""
    begun = reducer.round is not None and reducer.round.begun
    if begun or reducer.settings.strict or reducer.wanted():
        return False
    reducer.round = None
    return True


def past_forward(reducer: Reducer) -> Callable[[], None] | None:
    """Return what averages a backward whose forward did not run through the wrapper. None: nothing may.

    With RPC the gradients may be in a context, which only a forward can tell.
    """
    if reducer.settings.strict or rpc_context.is_used():
        return None
    return partial(_average_all, reducer)


def _average_all(reducer: Reducer) -> None:
    reducer.follow_module()
    with reducer.setup.lock:
        seen = reducer.begin_round(frozenset())
        # What a static graph used in its first step says nothing about this backward.
        seen.usage = None
        seen.end_known = seen.ended = True
    try:
        seen.complete()
        seen.average()
    finally:
        reducer.round = None
        seen.release()
        reducer.sender.step_ended()
    reducer.round_over()
