"""Copies of many tensors, around the caches of the processor where they are large and something is compiled for it.

torch copies through the caches: it reads the memory that it is about to overwrite, and drives out what the next step
needs. For a state that is larger than the caches this takes about 1.4 times as long (`_core/bulk_copy.c`).

Only ordinary tensors in the memory of the host whose elements lie in the same order on both sides are copied that way.
torch copies all others.
"""

from __future__ import annotations

import functools
import os
from array import array
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from ddp.telemetry import torch_api

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_LARGE = 256 << 10  # bytes of a tensor
_IN_CACHE = 16 << 20  # bytes of all of them that caches may hold until somebody reads the copy
_ORDINARY = {torch.Tensor, torch.nn.Parameter}


@functools.cache
def compiled() -> ModuleType | None:
    if os.environ.get("DDP_NATIVE", "1") == "0":
        return None
    try:
        native = import_module("ddp.elastic._bulk_copy")
    except ImportError:
        return None
    return native if native.is_fast() else None


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, which has the same shape. Call it under `torch.no_grad()`."""
    if (native := compiled()) is None:
        torch_api.copy_all(targets, sources)
        return
    around, through = _sorted_out(targets, sources)
    if around:
        rows = array("Q")
        for number in around:
            target, source = targets[number], sources[number]
            rows.extend((target.data_ptr(), source.data_ptr(), source.nbytes))
            torch.autograd.graph.increment_version(target)  # as torch does when it writes
        native.copy(rows)
    if through:
        torch_api.copy_all([targets[number] for number in through], [sources[number] for number in through])


def _sorted_out(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[int], list[int]]:
    """The numbers of the pairs that are copied around the caches, and of those that torch copies."""
    around: list[int] = []
    through: list[int] = []
    n_bytes = 0
    for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.nbytes >= _LARGE and _is_same_bytes(target, source):
            around.append(number)
            n_bytes += source.nbytes
        else:
            through.append(number)
    return (around, through) if n_bytes >= _IN_CACHE else ([], list(range(len(targets))))


def _is_same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy of the bytes is a copy of the tensor."""
    return (
        type(target) in _ORDINARY
        and type(source) in _ORDINARY
        and target.dtype == source.dtype
        and target.shape == source.shape
        and _is_plain(target)
        and _is_plain(source)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0  # torch has tensors of zeros without memory
    )
