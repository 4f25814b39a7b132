"""The collectives of the reducer: how the process groups average its buckets.

A group may have two methods that avoid copies:

    ddp_allocate(numel, dtype) -> Tensor         allocate a bucket in memory that the group's peers can read
    ddp_average(tensors, divisor, tag) -> Work   sum tensors over the ranks and divide, in place, without a bucket. It
                                                 fails on all ranks if they use different tags

The optional attribute `ddp_device_types` lists the device types that these methods support.

Any other group computes a sum of one tensor. If its all-reduce knows AVG, it divides too: NCCL's does, and a group with
the attribute `ddp_averages`. Otherwise the tensor is divided first: in half precision an undivided sum may overflow.

torch's backends may allocate memory that their transport has registered (`supports_tensor_alloc`, `allocate_tensor`).
As in torch's own reducer, buckets use it if DDP_DISABLE_COMM_MEM is 0.

With several groups, bucket i goes to group i modulo their number. Several collectives then run at the same
time, and their order is the same on all ranks.

The calls pass options and a timeout, as torch's reducer does. A group that is written in Python may require both. It
need not be registered with torch.distributed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from ddp.reducer import plan
from ddp.reducer.plan import Capabilities
from ddp.telemetry import torch_api
from ddp.telemetry.coded import WrongType

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("ddp")
GROUP_TIMEOUT = timedelta(0)  # the group's own timeout


class BucketCollectives:
    """Allocates and averages buckets with the process groups of one model."""

    def __init__(self, groups: Sequence[ProcessGroup], device: torch.device) -> None:
        self.groups = tuple(groups)
        self.costs = plan.choose(
            device.type, backend_name(self.groups, device), _offered(self.groups, device)
        )
        self._averages = [_find_method(group, device, "ddp_average") for group in self.groups]
        self._allocate = _find_method(self.groups[0], device, "ddp_allocate")

    @property
    def averages_lists(self) -> bool:
        """Whether one call averages many tensors and the group divides."""
        return all(average is not None for average in self._averages)

    @property
    def divides(self) -> bool:
        """Whether the group divides the sum of a dense bucket."""
        return self.averages_lists or self.costs.average_in_collective

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        storage: torch.Tensor | None = None
        if self._allocate is not None and numel and device.type == "cpu":
            storage = self._allocate(numel, dtype)
        elif self.costs.registered_memory:
            storage = self._registered(numel, dtype, device)
        return torch.empty(numel, dtype=dtype, device=device) if storage is None else storage

    def _registered(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Allocate memory that the transport has registered, or return None if the backend fails to."""
        try:
            storage: torch.Tensor = _backend(self.groups[0], device).allocate_tensor(
                numel, dtype=dtype, device=device
            )
        except RuntimeError as error:  # also if it is out of memory of this kind
            _log.warning("buckets are in ordinary memory: the backend cannot allocate its own (%s)", error)
            self.costs = replace(self.costs, registered_memory=False)
            return None
        return storage

    def average(self, turn: int, tensors: list[torch.Tensor], divisor: float, tag: int) -> Any:
        """Start to average tensors in place, and return the Work. Valid only if `averages_lists` is true."""
        average = self._averages[turn % len(self.groups)]
        if average is None:
            raise WrongType(
                f"internal error: process group {turn % len(self.groups)} has no method ddp_average"
            )
        return average(tensors, divisor, tag)

    def sum(self, turn: int, tensor: torch.Tensor, *, average: bool = False) -> Any:
        """Start to sum or average a tensor in place, and return the Work. Average only if `divides` is true."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        group = self.groups[turn % len(self.groups)]
        return group.allreduce([tensor], _averaging()) if average else start_sum(group, tensor)


def start_sum(group: ProcessGroup, tensor: torch.Tensor) -> Any:
    """Start to sum a tensor in place, and return the Work."""
    return group.allreduce([tensor], AllreduceOptions())


def broadcast_from_rank_0(group: ProcessGroup, tensor: torch.Tensor) -> None:
    group.broadcast([tensor], BroadcastOptions()).wait(GROUP_TIMEOUT)


def gather_rows(group: ProcessGroup, mine: torch.Tensor) -> list[list[int]]:
    rows = [torch.zeros_like(mine) for _ in range(group.size())]
    opts = AllgatherOptions()
    opts.asyncOp = False
    work = group.allgather([rows], [mine], opts)
    if work is not None:  # NCCL returns None for a synchronous call
        work.wait(GROUP_TIMEOUT)
    return [row.tolist() for row in rows]


def _averaging() -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    return options


def backend_name(groups: Sequence[ProcessGroup], device: torch.device) -> str:
    """Return the name of the backend that all groups use for this device, or an empty string."""
    names = {str(_backend(group, device).name()) for group in groups}
    return names.pop() if len(names) == 1 else ""


def _offered(groups: Sequence[ProcessGroup], device: torch.device) -> Capabilities:
    backends = [_backend(group, device) for group in groups]
    wanted = os.environ.get("DDP_DISABLE_COMM_MEM") == "0"
    return Capabilities(
        averages=all(getattr(backend, "ddp_averages", False) for backend in backends),
        allocates=wanted and _supports_allocation(backends[0], device),
    )


def _supports_allocation(backend: Any, device: torch.device) -> bool:
    try:
        return bool(backend.supports_tensor_alloc(device))
    except (AttributeError, RuntimeError, TypeError):  # a group in Python, or a torch without this method
        return False


def _backend(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for this device, or the group itself if it is written in Python."""
    try:
        return torch_api.backend_of(group, device)
    except (RuntimeError, AttributeError):
        return group


def _find_method(group: ProcessGroup, device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a method of the group, or of its backend for this device type. None if neither has it."""
    owner: Any = group
    if not hasattr(group, name):
        try:
            owner = torch_api.backend_of(group, device)
        except (RuntimeError, AttributeError):
            return None  # a group in Python, or without a backend for the device
    if device.type not in getattr(owner, "ddp_device_types", (device.type,)):
        return None
    return getattr(owner, name, None)
