"""The collectives that commits need, over any process group; a single rank skips them."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from ddp.telemetry import torch_api

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_PIECE = 64 << 20
_LENGTH = struct.Struct("<Q")
_SHORT = 1 << 10  # bytes of a value that are sent with its length


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
        """Return the values of all ranks, in order. They are pickled, which is safe between processes of one job.

        Most values are short. They need one collective, where `all_gather_object` needs two.
        """
        if self.size == 1:
            return [value]
        data = pickle.dumps(value)
        rows = self._all_gather(_LENGTH.pack(len(data)) + data[:_SHORT], _LENGTH.size + _SHORT)
        lengths = [_LENGTH.unpack_from(row)[0] for row in rows]
        found = [row[_LENGTH.size :][:length] for row, length in zip(rows, lengths, strict=True)]
        if max(lengths) > _SHORT:
            rests = self._all_gather(data[_SHORT:], max(lengths) - _SHORT)
            found = [
                begin + rest[: length - len(begin)]
                for begin, rest, length in zip(found, rests, lengths, strict=True)
            ]
        return [pickle.loads(each) for each in found]

    def _all_gather(self, data: bytes, n_bytes: int) -> list[bytes]:
        """The bytes of all ranks, each filled up to this length."""
        buffers = [bytearray(data.ljust(n_bytes, b"\0")), *(bytearray(n_bytes) for _ in range(self.size))]
        flat = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        mine, *rows = (each.to(self._device) for each in flat)
        dist.all_gather(rows, mine, group=self._group)
        for here, there in zip(flat[1:], rows, strict=True):
            if here is not there:
                here.copy_(there)
        return [bytes(buffer) for buffer in buffers[1:]]

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
