"""Coalesce status messages: hold them back while the status still changes.

If thousands of agents join at once, a status message to each agent after each join would take O(N^2) messages. Most of
them would be outdated before they are read. So a status message waits until no new one came for QUIET_S, and at most
LONGEST_S. A later message to the same agent replaces it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")

QUIET_S = 0.3
LONGEST_S = 4.0  # well below the time that a client waits for its first answer


class Coalescer(Generic[K, V]):
    """Keeps the latest message for each recipient; passes them to `deliver` in the order of the first `put`."""

    def __init__(self, deliver: Callable[[K, V], None]) -> None:
        self._deliver = deliver
        self._held: dict[K, V] = {}
        self._began_at = self._changed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, to: K, message: V) -> None:
        loop = asyncio.get_running_loop()
        self._held[to] = message
        self._changed_at = loop.time()
        if self._timer is None:
            self._began_at = self._changed_at
            self._timer = loop.call_at(self._changed_at + QUIET_S, self._flush_if_quiet)

    def drop(self, to: K) -> None:
        self._held.pop(to, None)

    def close(self) -> None:
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush_if_quiet(self) -> None:
        """Deliver, or set the timer again if a message came in the meantime. Resetting it each time would be slower."""
        loop = asyncio.get_running_loop()
        deadline = min(self._changed_at + QUIET_S, self._began_at + LONGEST_S)
        if self._held and loop.time() < deadline:
            self._timer = loop.call_at(deadline, self._flush_if_quiet)
            return
        self._timer = None
        held, self._held = self._held, {}
        for to, message in held.items():
            self._deliver(to, message)
