"""Types of one byte, such as FP8: they can be stored and broadcast as bytes, but no sum of them is defined.

A script that computes in FP8 keeps its parameters and gradients in a wider type and casts in the forward, so none of
its gradients is of one byte. Frozen parameters and buffers may be: a quantized model with trained adapters, for
example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer.collectives import broadcast_from_rank_0
from ddp.telemetry import torch_names
from ddp.telemetry.coded import WrongType

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch.distributed import ProcessGroup


_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_NARROW = frozenset(each for each in _DTYPES if each.is_floating_point and each.itemsize == 1)


def refuse_narrow(module: Any, mixed_precision: Any) -> None:
    """Raise if the gradients of trained parameters cannot be averaged."""
    reduced = getattr(mixed_precision, "reduce_dtype", None)
    if reduced is not None and reduced in _NARROW:
        raise WrongType(
            f"invalid mixed_precision: no sum is defined for reduce_dtype={_short(reduced)}. Use bfloat16 or float16"
        )
    if not isinstance(module, torch.nn.Module):
        return  # torch says what is wrong
    ignored = set(getattr(module, torch_names.IGNORED, ()))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            _refuse_narrow_parameter(name, parameter)


def _refuse_narrow_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype in _NARROW:
        raise WrongType(
            f"the parameter {name!r} is of type {_short(parameter.dtype)}, and so is its gradient, which cannot be "
            "averaged: no sum is defined for this type. Keep parameters that are trained in bfloat16 or wider, and "
            "cast them in the forward; or freeze this one with requires_grad_(False)"
        )
    wanted = getattr(parameter, "grad_dtype", None)
    if wanted is not None and wanted != parameter.dtype:
        raise WrongType(
            f"the parameter {name!r} is of type {_short(parameter.dtype)}, but its grad_dtype is {_short(wanted)}. A "
            "gradient is averaged in the type of its parameter. Remove grad_dtype, or keep the parameter in that type "
            "and cast it in the forward"
        )


def as_bytes(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors for a broadcast; those of a type that backends do not know as bytes in the same memory."""
    if _NARROW.isdisjoint([tensor.dtype for tensor in tensors]):  # buffers come here before each forward
        return list(tensors)
    return [tensor.detach().view(torch.uint8) if tensor.dtype in _NARROW else tensor for tensor in tensors]


def narrow_state(
    module: torch.nn.Module, ignored: Iterable[str], *, buffers: bool
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of one byte, by their names."""
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    left = set(ignored)
    return {name: tensor for name, tensor in named if name not in left and tensor.dtype in _NARROW}


def broadcast_as_bytes(group: ProcessGroup, tensors: Collection[torch.Tensor]) -> None:
    """Send the values of rank 0 to all ranks, as bytes."""
    for each in as_bytes(tensors):
        sent = each.contiguous()
        broadcast_from_rank_0(group, sent)
        if sent is not each:
            each.copy_(sent)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
