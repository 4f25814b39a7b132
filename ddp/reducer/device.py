"""What an accelerator does while the host goes on: the order of its streams, copies to the host, and its clock.

The host only enqueues work. It waits for the device only if it reads a number or a time that has not arrived yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ddp.telemetry import capture

# --- streams ---------------------------------------------------------------------------------------
#
# Order a launch after the copies into its bucket if they ran on another stream.
#
# A copy runs on the current stream of the thread that gathers. The thread that launches may be another one, with
# another current stream on the bucket's device. A collective waits only for the current stream of the thread that
# launches it.


def note_stream(streams: dict[int, list[torch.Stream]], bucket: int, device: torch.device) -> None:
    """Record the stream on which a chunk of a bucket was gathered."""
    if not has_streams(device.type):
        return
    stream = torch.accelerator.current_stream(device)
    known = streams.setdefault(bucket, [])
    if stream not in known:
        known.append(stream)


def follow_streams(streams: Sequence[torch.Stream], device: torch.device) -> None:
    """Let the current stream of the device wait for these streams. The host does not wait."""
    if not streams:
        return
    current = torch.accelerator.current_stream(device)
    for stream in streams:
        if stream != current:
            current.wait_stream(stream)


@cache
def has_streams(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


# --- a few numbers between host and device ---------------------------------------------------------
#
# A plain copy makes the host wait until the device has finished everything before it: the training thread can then not
# prepare further work, and the device idles. A copy through pinned memory runs in the stream like a kernel. An event
# after it tells when its numbers have arrived on the host, and only a reader of the numbers waits for it.


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


# --- the clock for the stages of a step ------------------------------------------------------------
#
# The host's clock, or on an accelerator the device's.
#
# On an accelerator the host only enqueues work, so its clock shows nothing about the work. There, a moment is an event
# in the current stream. Recording one does not wait. Its time is known after the device has passed it.


class HostClock:
    """Its moments are nanoseconds."""

    runs = True

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now

    def now(self) -> Any:
        return self._now()

    def has_passed(self, moment: Any) -> bool:
        return True

    def nanoseconds(self, moment: Any) -> int:
        return int(moment)

    def measure_from(self, moment: Any) -> None:
        """Do nothing: all moments are measured alike."""


class DeviceClock:
    """Its times are that of the host when the first moment was recorded, plus what the device has measured since."""

    def __init__(self, device: torch.device, host: Callable[[], int]) -> None:
        self._device = device
        self._host = host
        self._base: tuple[Any, int] | None = None

    @property
    def runs(self) -> bool:
        """Whether moments can be recorded and read now. A captured step does not have any."""
        return not capture.is_capturing()

    def now(self) -> Any:
        """Record this moment."""
        event = _timed_event(self._device)
        event.record()
        if self._base is None:
            self._base = event, self._host()
        return event

    def has_passed(self, moment: Any) -> bool:
        """Whether `nanoseconds` returns at once."""
        return bool(moment.query())

    def nanoseconds(self, moment: Any) -> int:
        """Wait until the moment has passed, and return its time."""
        assert self._base is not None
        event, at = self._base
        if not moment.query():
            moment.synchronize()
        return at if moment is event else at + int(event.elapsed_time(moment) * 1e6)

    def measure_from(self, moment: Any) -> None:
        """Measure later moments from this one, which has passed: devices lose precision over long spans."""
        self._base = moment, self.nanoseconds(moment)


Clock = HostClock | DeviceClock


def clock_of(device: torch.device, host: Callable[[], int] = time.perf_counter_ns) -> Clock:
    """Return the clock of a device. `host` is the clock of the host that it follows."""
    return DeviceClock(device, host) if _has_timed_events(device.type) else HostClock(host)


def _timed_event(device: torch.device) -> Any:
    return torch.Event(device=device, enable_timing=True)


@cache
def _has_timed_events(device_type: str) -> bool:
    if not has_streams(device_type):
        return False
    try:
        first, last = (_timed_event(torch.device(device_type)) for _ in range(2))
        first.record()
        last.record()
        last.synchronize()
        first.elapsed_time(last)
    except (RuntimeError, NotImplementedError):
        return False
    return True
