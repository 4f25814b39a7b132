"""Gradients that do not come from a forward of a wrapped module.

The gradients of `module.module(x).backward()` belong to no round. The same holds for a parameter that is used outside
the forward, in a separate backward. The replicas would silently diverge, so the reducer averages them when the backward
ends, or raises (`strict=True`), unless

- the script asked for local gradients with `no_sync()`;
- another wrapper of the same parameters averages in this backward;
- another, newer wrapper has the same parameters: then only the newest wrapper averages or raises.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from torch.utils.weak import WeakIdKeyDictionary

from ddp.reducer import engine, errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Guarded(Protocol):
    """The members of a reducer that this module uses."""

    parameters: list[torch.Tensor]
    names: list[str]
    stray_task: int
    synchronizes: bool

    @property
    def rank(self) -> int: ...
    def wanted(self) -> bool: ...
    def shares_parameters_with(self, other: Guarded) -> None: ...


# For each parameter, weak references to all reducers that exist. The latest one owns the parameter.
_reducers = WeakIdKeyDictionary()
# The engine's tasks in which a reducer has averaged. The engine never reuses a task number.
_served: deque[int] = deque(maxlen=256)


def own(reducer: Guarded, parameters: Sequence[torch.Tensor]) -> None:
    """Register a reducer. Notify all reducers that share parameters: they may run in the same backward."""
    reference = weakref.ref(reducer)
    others: dict[int, Guarded] = {}
    for parameter in parameters:
        living = [known for known in _reducers.get(parameter, ()) if known() not in (None, reducer)]
        others.update((id(other), other) for known in living if (other := known()) is not None)
        _reducers[parameter] = [*living, reference]
    for other in others.values():
        other.shares_parameters_with(reducer)
        reducer.shares_parameters_with(other)


def is_owner(reducer: Guarded) -> bool:
    """Whether this reducer was registered with `own`."""
    return any(known() is reducer for known in _reducers.get(reducer.parameters[0], ()))


def _owner_of(parameter: torch.Tensor) -> Guarded | None:
    known = _reducers.get(parameter)
    owner: Guarded | None = known[-1]() if known else None
    return owner


def serve(task: int) -> None:
    _served.append(task)


def arrived(reducer: Guarded, index: int, average: Callable[[], None] | None) -> None:
    """Handle a gradient without a round. `average` runs when the backward ends; None: that is an error."""
    task = engine.current_task()
    meant = not reducer.synchronizes or not reducer.wanted()
    if meant or task in _served or task == reducer.stray_task:
        return
    if _owner_of(reducer.parameters[index]) is not reducer:
        return
    reducer.stray_task = task

    def end() -> None:
        if task in _served:  # a reducer has begun a round later in the same backward
            return
        if average is None:
            raise errors.outside([reducer.names[index]], reducer.rank)
        average()

    engine.when_it_ends(end)
