"""Whether the service itself is well: what its metrics show, and `ddp-rendezvous doctor` checks."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rendezvous.access.secret import ends_of

if TYPE_CHECKING:
    from rendezvous.metrics import Metrics

_CAS = ("client_ca", "store_cacert")
_MEASURED_EVERY_S = 0.25
_KEPT_S = 60.0


def left_s(name: str, path: str) -> float:
    """How long the certificates of a file remain valid. Raises `OSError`, `ValueError`.

    In a chain, the first that ends counts. Of several CAs, the last: a new one stands beside the one that it replaces.
    """
    ends = ends_of(path)
    return max(0.0, (max(ends) if name in _CAS else min(ends)) - time.time())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def most_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Delay:
    """How late the event loop has run a timer in the last minute or two."""

    def __init__(self) -> None:
        self._before = self._now = 0.0

    @property
    def seconds(self) -> float:
        return max(self._before, self._now)

    async def measure(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            due = loop.time() + _MEASURED_EVERY_S
            await asyncio.sleep(_MEASURED_EVERY_S)
            self._now = max(self._now, loop.time() - due)
            if loop.time() - since > _KEPT_S:
                self._before, self._now, since = self._now, 0.0, loop.time()


def declare(
    metrics: Metrics, delay: Delay, certificates: Mapping[str, str], store_wait_s: Callable[[], float]
) -> None:
    began_at = time.time()

    def left(name: str, path: str) -> float:
        try:
            return left_s(name, path)
        except (OSError, ValueError):
            return 0.0

    metrics.gauges(
        "certificate_seconds_left",
        "Time until a certificate of the service or of its store ends; 0: it has, or cannot be read.",
        "file",
        lambda: {name: left(name, path) for name, path in certificates.items()},
    )
    metrics.gauge("start_time_seconds", "When the process started, as a Unix time.", lambda: round(began_at))
    metrics.gauge(
        "delay_seconds", "The greatest delay of the event loop in the last minute.", lambda: delay.seconds
    )
    metrics.gauge("store_wait_seconds", "How long the oldest write waits for the store.", store_wait_s)
    metrics.gauge("open_files", "Open file descriptors.", open_files)
    metrics.gauge("most_files", "How many file descriptors may be open.", most_files)
    metrics.gauge("resident_bytes", "Memory of the process.", resident_bytes)
