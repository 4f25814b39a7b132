"""Gradients of a distributed backward (RPC). A torch.distributed.autograd context holds them instead of `.grad`.

`dist_autograd.backward(context_id, ...)` adds a gradient to its context, then calls the same hooks as a local
backward. Python can read the gradients of a context. It gets the tensors themselves, so averaging them in place
averages them in the context. At the end of such a backward, this module therefore puts the context's gradients into
`.grad`, lets the buckets be sent, and restores the script's own `.grad`.

Hooks run on torch's threads, where the context is not set. The forward records the context, so the forward must also
run in the context.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.autograd import get_gradients, is_available

from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_rpc_is_used: Callable[[], bool] = torch_api.get(torch_names.RPC_IS_USED) if is_available() else bool


def uses_rpc() -> bool:
    """Whether the script has started RPC."""
    return _rpc_is_used()


def current_context() -> int | None:
    """Return the context of this thread, or None."""
    if not _rpc_is_used():
        return None
    try:
        return torch_api.rpc_context_id()
    except RuntimeError:  # the script uses RPC, but this forward runs outside a context
        return None


def _gradients_of_context(context: int) -> dict[torch.Tensor, torch.Tensor]:
    try:
        return get_gradients(context)
    except RuntimeError:  # the context has ended
        return {}


def is_stored_in_context(context: int | None, parameter: torch.Tensor) -> bool | None:
    """Whether the context has the gradient that was computed for this parameter, and not its `.grad`.

    None: neither has it, so it is in a context in which the forward did not run.
    """
    if context is not None and parameter in _gradients_of_context(context):
        return True
    return None if parameter.grad is None else False


@contextmanager
def in_place_of_grad(context: int, parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Move the context's gradients to `.grad` inside the block.

    Yields the parameters with a gradient on other ranks only.
    """
    without: list[int] = []
    held = _gradients_of_context(context)
    own = [parameter.grad for parameter in parameters]
    gradients = [held.get(parameter) for parameter in parameters]
    try:
        _place_gradients(parameters, gradients)
        yield without
        averages = [parameter.grad for parameter in parameters]
    finally:
        _place_gradients(parameters, own)
    for i, (gradient, average) in enumerate(zip(gradients, averages, strict=True)):
        if gradient is None and average is not None:
            without.append(i)
        elif gradient is not average and gradient is not None and average is not None:
            with torch.no_grad():
                gradient.copy_(average)


def _place_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
