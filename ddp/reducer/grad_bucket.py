"""The argument of a communication hook. It has the methods of torch's GradBucket, which has no constructor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp.telemetry.coded import WrongUse


class GradBucket:
    """One bucket, as a communication hook receives it."""

    def __init__(
        self,
        index: int,
        last: bool,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str] = (),
    ) -> None:
        self._index = index
        self._last = last
        self._buffer = buffer
        self._parameters = parameters
        self._names = names

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward, the one with the first layers."""
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def names(self) -> list[str]:
        """Return the names of the parameters, in order. torch's bucket does not have this method."""
        return list(self._names)

    def gradients(self) -> list[torch.Tensor]:
        """Return the buffer, split into tensors with the shapes of the parameters."""
        if self._buffer.is_sparse:
            return [self._buffer]
        sizes = [parameter.numel() for parameter in self._parameters]
        pieces = torch.split(self._buffer[: sum(sizes)], sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]


def result_of(future: Any) -> torch.Tensor:
    """Wait for the future of a hook and return its tensor."""
    value = future.wait()
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        tensor: torch.Tensor = value[0]
        return tensor
    raise WrongUse(
        f"the communication hook's future holds {type(value).__name__}; "
        "expected the hook result to be a Tensor or a list of one Tensor"
    )
