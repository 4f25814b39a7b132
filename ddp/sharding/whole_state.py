"""Split the optimizer state of whole parameters into the state of their pieces, and join it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer.bucket import like_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# State entries of torch's optimizers that are one number for a whole parameter.
_OF_THE_WHOLE = {"step", "mu_product", "eta", "mu"}


def cut(state: Mapping[str, Any], parameter: torch.Tensor, start: int, end: int) -> dict[str, Any]:
    """Return the part of a parameter's state for its elements [start, end), in memory order."""
    return {name: _cut(name, value, parameter, start, end) for name, value in state.items()}


def _cut(name: str, value: Any, parameter: torch.Tensor, start: int, end: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_elementwise(name, tuple(value.shape), parameter):
        return _flat(value, parameter)[start:end].clone()
    return value.clone()  # a copy: otherwise the step would also increment the counter in the caller's state


def is_elementwise(name: str, shape: tuple[int, ...], parameter: torch.Tensor) -> bool:
    """Whether an entry of a whole parameter's state has a number for each element of the parameter."""
    return name not in _OF_THE_WHOLE and shape == tuple(parameter.shape)


def _flat(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    laid_out = like_gradient(parameter, value).copy_(value)
    return laid_out.as_strided((value.numel(),), (1,))


def put_together(
    pieces: Iterable[tuple[int, int, Mapping[str, Any]]], parameter: torch.Tensor
) -> dict[str, Any]:
    """Join the states of all pieces of a parameter, given as (start, end, state), into the parameter's state."""
    whole: dict[str, Any] = {}
    for start, end, state in pieces:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != (end - start,) or name in _OF_THE_WHOLE:
                whole[name] = value
                continue
            if name not in whole:
                whole[name] = like_gradient(parameter, value)
            whole[name].as_strided((parameter.numel(),), (1,))[start:end] = value
    return whole
