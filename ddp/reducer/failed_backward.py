"""The gradients of a rank whose backward raised.

The other ranks wait for all buckets, so the rank sends them with the gradients that it has. It does not take part in
this step itself, and keeps its own gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.bucket_sender import BucketSender
    from ddp.reducer.reducer import Reducer
    from ddp.reducer.round import Round


def abandon(reducer: Reducer, seen: Round) -> None:
    """Finish a backward that raised: send the buckets that other ranks may wait for, and keep the local gradients.

    The caller holds the lock. Hooks of this backward may still run on other threads. They have no effect any more.
    """
    setup, sender = reducer.setup, reducer.sender
    setup.failed_tasks = frozenset({*seen.tasks, reducer.end_task})
    local = LocalGradients(reducer.parameters, sender)
    reducer.take_part_in_rebuild()
    try:
        seen.complete()
        reducer.average(seen)
    finally:
        reducer.round, reducer.end_task = None, -1
        sender.step_ended()
    setup.partly_averaged = local.restore()
    reducer.round_over()


class LocalGradients:
    """Keeps the gradients while their buckets are averaged, and restores them."""

    def __init__(self, parameters: Sequence[torch.Tensor], sender: BucketSender) -> None:
        self._parameters = parameters
        self._grads = [parameter.grad for parameter in parameters]
        self._taken = sender.owned_gradients(self._grads)
        self._values = [None if grad is None else grad.detach().clone() for grad in self._grads]

    def restore(self) -> list[tuple[int, torch.Tensor, int]]:
        """Restore the gradients. Return those that are partly averaged: parameter, gradient, version.

        They were in a bucket when the backward raised. A later backward must not add to them.
        """
        with torch.no_grad():
            for parameter, grad, value in zip(self._parameters, self._grads, self._values, strict=True):
                parameter.grad = grad
                if grad is not None and value is not None:
                    grad.copy_(value)
        return [(i, grad, grad._version) for i, grad in self._taken.items()]
