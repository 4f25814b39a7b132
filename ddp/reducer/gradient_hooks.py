"""Hooks that tell when a gradient has been added to `.grad`.

They sit on the nodes of the autograd graph that accumulate, as torch's do: whatever a user hangs onto a parameter
or its gradient has run before. At first every parameter has a hook. Once the order of arrival is known, one sentinel
per chunk of neighbours is enough: when the last of a chunk arrives the others are there, which is looked at, not
believed. A hook of Python costs about a microsecond, which 2,000 small parameters would feel.

The engine owns hooks, and no garbage collector sees through it: they know whom to tell by weak references, and are
taken off as soon as the watch goes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from ddp.reducer.unused import accumulator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


class Watch:
    def __init__(self, parameters: Sequence[torch.Tensor], arrived: Callable[[int], None]) -> None:
        self._arrived = WeakMethod(arrived)
        self._handles: list[Any] = []
        # The nodes live as long as somebody holds them; hooks die with them.
        self.accumulators = [accumulator(parameter) for parameter in parameters]

    def every_parameter(self) -> None:
        self.remove()
        self._handles = [
            node.register_hook(partial(_tell, self._arrived, i)) for i, node in enumerate(self.accumulators)
        ]

    def sentinels(self, what: Mapping[int, int], fired: Callable[[int], None]) -> None:
        """`what`: the parameter that stands sentinel -> what to say when its gradient is there."""
        self.remove()
        whom = WeakMethod(fired)
        self._handles = [
            self.accumulators[i].register_hook(partial(_tell, whom, said)) for i, said in what.items()
        ]

    def __del__(self) -> None:
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _tell(whom: WeakMethod[Callable[[int], None]], what: int, _incoming: Any, _outgoing: Any) -> None:
    # It must return None: anything else would be taken for other gradients.
    listener = whom()
    if listener is not None:
        listener(what)
