"""Wrappers for all_gather_into_tensor and reduce_scatter_tensor, whose names differ between torch versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    import torch


def chosen() -> tuple[Any, Any]:
    """Return the functions under their names since 2.12 if they exist: torch then warns about the older names."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather, getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_all_gather, _reduce_scatter = chosen()


def all_gather(into: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-gather; return its Work. `part` may be this rank's slice of `into`."""
    return _all_gather(into, part, group=group, async_op=True)


def reduce_scatter(into: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, averages: bool) -> Any:
    """Start a reduce-scatter of sums or averages; return its Work, which may not support futures."""
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    return _reduce_scatter(into, parts, op, group=group, async_op=True)
