"""The collectives that commits need, over any process group; a single rank skips them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ddp.telemetry import torch_api

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

T = TypeVar("T")
_PIECE = 64 << 20


class Team:
    """The ranks that commit together."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self._together else 0
        self.size = dist.get_world_size(group) if self._together else 1
        self._device = _device_of(group) if self._together else torch.device("cpu")
        self._flag = torch.zeros(1, dtype=torch.int32, device=self._device)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order. They are pickled, which is safe between processes of one job."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        self._flag.fill_(int(flag))
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(self._flag.item())

    def union(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank. All ranks pass the same number."""
        if self.size == 1 or not flags:
            return flags
        found = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(each) for each in found.tolist()]

    def share(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor of rank 0, which has the same size on all ranks."""
        if self.size == 1:
            return data
        there = data.to(self._device)
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast(there, source, group=self._group)
        return there.to(data.device)

    def first(self, make: Callable[[], T]) -> T:
        """Return on every rank the value that rank 0 makes."""
        return self.gather(make() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def broadcast(self, data: memoryview | None, root: int) -> memoryview:
        """Broadcast bytes from the root. Return them on every rank."""
        n_bytes = self.gather(len(data) if data is not None and self.rank == root else 0)[root]
        if data is None or self.rank != root:
            data = memoryview(bytearray(n_bytes))
        flat = torch.frombuffer(data, dtype=torch.uint8)
        source = root if self._group is None else dist.get_global_rank(self._group, root)
        for piece in torch.split(flat, _PIECE):
            there = piece.to(self._device)
            dist.broadcast(there, source, group=self._group)
            if self.rank != root and there is not piece:
                piece.copy_(there)
        return data


def _device_of(group: ProcessGroup | None) -> torch.device:
    """The CPU if the group supports it, else this process's own device."""
    kinds = torch_api.device_types(group or dist.group.WORLD)
    return next((kind for kind in kinds if kind.type == "cpu"), kinds[0])
