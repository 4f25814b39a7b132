"""Hooks that report when a gradient has been added to `.grad`.

The hooks are on the accumulator nodes of the autograd graph, as in torch. The script's own hooks on a parameter or its
gradient therefore run earlier.

The engine owns the hooks, and the garbage collector does not see references through the engine. The hooks therefore
hold weak references to their listeners, and `GradientHooks` removes them when it is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from ddp.reducer.unused import accumulator
from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddp.reducer.arrivals import Arrivals

_engine = torch_api.get(torch_names.ENGINE)


class GradientHooks:
    """The hooks of one reducer, one on each parameter."""

    def __init__(self, parameters: Sequence[torch.Tensor], arrivals: Arrivals) -> None:
        self._handles: list[Any] = []  # first: it is deleted too if a parameter cannot have a hook
        # Keep the nodes alive: a node lives only while it is referenced, and its hooks are lost with it.
        self.accumulators = [accumulator(parameter) for parameter in parameters]
        self._callbacks = [arrivals.hook(i, each) for i, each in enumerate(parameters)]
        self._handles = [
            node.register_hook(call) for node, call in zip(self.accumulators, self._callbacks, strict=True)
        ]

    def report(self, index: int) -> None:
        """Report a gradient in place of a hook."""
        self._callbacks[index]()

    def __del__(self) -> None:
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def when_it_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward ends without an error. `backward()` raises what `callback` raises."""
    _engine.queue_callback(callback)


def weakly(method: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Return a function that calls `method(*arguments)` while its object exists. It ignores its own arguments."""
    call_method = weakly_with(method)

    def call(*_ignored: Any) -> None:
        call_method(*arguments)

    return call


def weakly_with(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method with its arguments while the method's object exists."""
    # Faster than weakref.WeakMethod, which makes a bound method for every call.
    owner, function = ref(method.__self__), method.__func__

    def call(*arguments: Any) -> None:  # a hook must return None: any other value would replace the gradients
        if (living := owner()) is not None:
            function(living, *arguments)

    return call
