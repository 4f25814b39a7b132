"""The seam between the reducer and the groups that carry its buckets.

A group may offer two methods of its own, and is then spared copies:

    ddp_allocate(numel, dtype) -> Tensor         storage for a bucket where the group's peers can read it
    ddp_average(tensors, divisor) -> Work        sum over the ranks, divided, in place, without a bucket

`ddp_device_types`, where a group has it, lists the types of devices that these methods serve. A group with
`ddp_averages_shards` takes AVG in a reduce-scatter of CPU tensors, and rounds once.

Any other group is asked for a plain sum of one tensor, which has been divided before: in half precision the sum of
what is not divided may overflow. With several groups, bucket i goes to group i modulo their number: several
collectives are then under way at once, in one order.

Groups are called as torch's reducer calls them, with options and a limit for the wait: one that is written in Python
may insist on both, and need not be known to torch.distributed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

AS_LONG_AS_IT_TAKES = timedelta(0)  # the group's own timeout


class Carrier:
    def __init__(self, groups: Sequence[ProcessGroup], device: torch.device) -> None:
        self.groups = tuple(groups)
        self._averages = [_offered(group, device, "ddp_average") for group in self.groups]
        self._allocate = _offered(self.groups[0], device, "ddp_allocate")
        self.averages_shards: bool = device.type == "cpu" and getattr(groups[0], "ddp_averages_shards", False)
        # How many elements of memory follow a bucket, so that it can be cut into equal shards.
        self.slack = 0

    @property
    def takes_lists(self) -> bool:
        """Whether many tensors may be averaged in one call, and the division is the group's own."""
        return all(average is not None for average in self._averages)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        room = numel + self.slack
        if self._allocate is not None and numel and device.type == "cpu":
            storage: torch.Tensor = self._allocate(room, dtype)
        else:
            storage = torch.empty(room, dtype=dtype, device=device)
        return storage[:numel] if self.slack else storage

    def average(self, turn: int, tensors: list[torch.Tensor], divisor: float) -> Any:
        """Only where `takes_lists`. -> Work"""
        average = self._averages[turn % len(self.groups)]
        if average is None:
            raise TypeError("this group has no ddp_average")
        return average(tensors, divisor)

    def sum(self, turn: int, tensor: torch.Tensor) -> Any:
        """-> Work, whose tensors are those that were given."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return summed(self.groups[turn % len(self.groups)], tensor)


def summed(group: ProcessGroup, tensor: torch.Tensor) -> Any:
    """-> Work"""
    return group.allreduce([tensor], AllreduceOptions())


def told_by_rank_0(group: ProcessGroup, tensor: torch.Tensor) -> None:
    group.broadcast([tensor], BroadcastOptions()).wait(AS_LONG_AS_IT_TAKES)


def gathered(group: ProcessGroup, mine: torch.Tensor) -> list[list[int]]:
    rows = [torch.zeros_like(mine) for _ in range(group.size())]
    opts = AllgatherOptions()
    opts.asyncOp = False
    work = group.allgather([rows], [mine], opts)
    if work is not None:  # NCCL has none for who waits anyway
        work.wait(AS_LONG_AS_IT_TAKES)
    return [row.tolist() for row in rows]


def _offered(group: ProcessGroup, device: torch.device, name: str) -> Callable[..., Any] | None:
    """A method of the group, or of the backend that the group has for this kind of device."""
    offering: Any = group
    if not hasattr(group, name):
        try:
            offering = group._get_backend(device)
        except (RuntimeError, AttributeError):
            return None  # a group in Python, or one that has no backend for the device
    if device.type not in getattr(offering, "ddp_device_types", (device.type,)):
        return None
    return getattr(offering, name, None)
