"""The buckets of a sharded optimizer: all parameters side by side, and this rank's shard of their gradients.

A bucket moves its parameters into one flat tensor, in the order and layout that their gradients have in DDP's bucket.
A shard is therefore a slice. Gradients are reduce-scattered from DDP's bucket, and parameters are all-gathered in
place. The optimizer receives pieces of parameters, as one-dimensional tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddp.groups.single_tensor import all_gather, reduce_scatter
from ddp.reducer.bucket import gradient_strides
from ddp.sharding.shards import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist


class ShardedBucket:
    """One bucket of DDP with its parameters in a flat tensor."""

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, averages: bool) -> None:
        """Move the parameters into the flat tensor.

        `averages`: whether the process group divides the sums. If false, the gradients were divided before.
        """
        self.parameters = list(parameters)
        self._group, self._averages = group, averages
        self._world = group.size()
        sizes = [parameter.numel() for parameter in self.parameters]
        self.shard = shard(sizes, self._world, group.rank())
        like = self.parameters[0]
        self._room = self.shard.size * self._world
        self._flat = torch.zeros(self._room, dtype=like.dtype, device=like.device)
        self._move_in(sizes)
        self._own = self._flat[self.shard.begin : self.shard.begin + self.shard.size]
        self.pieces = [self._own[p.offset : p.offset + p.end - p.start] for p in self.shard.pieces]
        self._coming: torch.Tensor | None = None
        self._work: Any = None

    def _move_in(self, sizes: Sequence[int]) -> None:
        offset = 0
        self._places = []
        for parameter, size in zip(self.parameters, sizes, strict=True):
            place = self._flat.as_strided(parameter.shape, gradient_strides(parameter), offset)
            place.copy_(parameter.detach())
            parameter.data = place
            self._places.append(place.data_ptr())
            offset += size

    def moved_out(self) -> int | None:
        """Return the first parameter that has left the flat tensor, for example by `module.to()` or `.data =`."""
        for i, (parameter, place) in enumerate(zip(self.parameters, self._places, strict=True)):
            if parameter.data_ptr() != place and parameter.numel():
                return i
        return None

    # --- gradients ---------------------------------------------------------------------------------

    def scatter(self, buffer: torch.Tensor) -> None:
        """Launch the reduce-scatter of a bucket's gradients."""
        # New memory in each step: an optimizer or the script may keep the gradients of earlier steps.
        self._coming = torch.empty_like(self._own)
        given = _real(self._pad(buffer))
        self._work = reduce_scatter(_real(self._coming), given, self._group, self._averages)

    def _pad(self, buffer: torch.Tensor) -> torch.Tensor:
        storage, begin = buffer.untyped_storage(), buffer.storage_offset()
        if storage.nbytes() >= (begin + self._room) * buffer.element_size():
            return buffer.as_strided((self._room,), (1,), begin)
        padded = buffer.new_zeros(self._room)
        padded[: buffer.numel()].copy_(buffer)
        return padded

    def take(self, used: Callable[[int, torch.Tensor], bool]) -> None:
        """Wait for this rank's shard. Store it in the `.grad` of the pieces, or add it if `.grad` exists."""
        came, self._coming, work, self._work = self._coming, None, self._work, None
        if came is not None:
            work.wait()
            for piece, described in zip(self.pieces, self.shard.pieces, strict=True):
                gradient = came[described.offset : described.offset + piece.numel()]
                if not used(described.member, gradient):
                    continue
                if piece.grad is None:
                    piece.grad = gradient
                else:
                    piece.grad.add_(gradient)
        for parameter in self.parameters:
            parameter.grad = None

    # --- parameters --------------------------------------------------------------------------------

    def gather(self) -> Any:
        """Launch the all-gather of the parameters. -> Work"""
        return all_gather(_real(self._flat), _real(self._own), self._group)


def _real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
