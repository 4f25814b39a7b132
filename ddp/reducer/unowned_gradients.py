"""Gradients that no forward of a wrapped module asked for.

`module.module(x).backward()` gives gradients that nobody averages; so does a parameter that is used outside of the
forward in a backward of its own. The replicas would drift apart without a word, so it is an error, unless

- gradients of this rank alone were asked for, with `no_sync()`;
- another wrapper of the same parameters is at work in this backward, or was made later: the older one is silent.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from torch.utils.weak import WeakIdKeyDictionary

from ddp.reducer import engine, errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Guarded(Protocol):
    """What is asked of a reducer."""

    parameters: list[torch.Tensor]
    names: list[str]
    stray_task: int
    synchronizes: bool

    @property
    def rank(self) -> int: ...
    def wanted(self) -> bool: ...
    def shares_parameters_with(self, other: Guarded) -> None: ...


# Of each parameter all reducers that live, by weak references; the latest is its owner.
_reducers = WeakIdKeyDictionary()
# The engine's tasks in which a reducer has been at work; they are numbered, and never used twice.
_served: deque[int] = deque(maxlen=256)


def own(reducer: Guarded, parameters: Sequence[torch.Tensor]) -> None:
    """Where others have some of them too, all are told: they may be at work in the same backward."""
    reference = weakref.ref(reducer)
    others: dict[int, Guarded] = {}
    for parameter in parameters:
        living = [known for known in _reducers.get(parameter, ()) if known() is not None]
        others.update((id(other), other) for known in living if (other := known()) is not None)
        _reducers[parameter] = [*living, reference]
    for other in others.values():
        other.shares_parameters_with(reducer)
        reducer.shares_parameters_with(other)


def _owner_of(parameter: torch.Tensor) -> Guarded | None:
    known = _reducers.get(parameter)
    owner: Guarded | None = known[-1]() if known else None
    return owner


def serve(task: int) -> None:
    _served.append(task)


def arrived(reducer: Guarded, index: int) -> None:
    task = engine.current_task()
    meant = not reducer.synchronizes or not reducer.wanted()
    if meant or task in _served or task == reducer.stray_task:
        return
    if _owner_of(reducer.parameters[index]) is not reducer:
        return
    reducer.stray_task = task

    def complain() -> None:
        # A reducer may have begun its work later in the same backward.
        if task not in _served:
            raise errors.outside([reducer.names[index]], reducer.rank)

    engine.when_it_ends(complain)
