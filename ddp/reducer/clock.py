"""The clock for the stages of a step: the host's clock, or on an accelerator the device's.

On an accelerator the host only enqueues work, so its clock shows nothing about the work. There, a moment is an event in
the current stream. Recording one does not wait. Its time is known after the device has passed it.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer.streams import has_streams
from ddp.telemetry import capture

if TYPE_CHECKING:
    from collections.abc import Callable


class HostClock:
    """Its moments are nanoseconds."""

    is_on_device = False
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

    is_on_device = True

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
