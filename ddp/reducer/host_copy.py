"""Copies of a few numbers between host and accelerator, without waiting for the device.

A plain copy makes the host wait until the device has finished everything before it: the training thread can then not
prepare further work, and the device idles. A copy through pinned memory runs in the stream like a kernel. An event
after it tells when its numbers have arrived on the host, and only a reader of the numbers waits for it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ddp.reducer.streams import has_streams


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on `device`. The host does not wait for the copy."""
    if device.type == "cpu":
        return values
    return _pinned_like(values, device.type).copy_(values).to(device, non_blocking=True)


class HostCopy:
    """The values of a tensor at the time of the construction, for a later reader on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        self._arrival: Any = None
        if has_streams(tensor.device.type):
            self._values = _pinned_like(tensor, tensor.device.type).copy_(tensor, non_blocking=True)
            self._arrival = torch.Event(device=tensor.device)
            self._arrival.record()

    @property
    def has_arrived(self) -> bool:
        """Whether `read` returns at once."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> list[Any]:
        """Wait for the copy and return its values."""
        if not self.has_arrived:
            self._arrival.synchronize()
        self._arrival = None
        values: list[Any] = self._values.tolist()
        return values


def _pinned_like(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_can_pin(device_type))


@cache
def _can_pin(device_type: str) -> bool:
    """Whether torch can pin memory for this device. If not, the copies are right, but the host waits for them."""
    if not has_streams(device_type):
        return False
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True
