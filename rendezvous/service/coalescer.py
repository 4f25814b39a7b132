"""Word of how things stand, held back while things move.

When thousands join at once, each of them would be told how many are here, and the round would seal before most had
read it; a line on a terminal is not worth a message each. So such a word waits until nothing new came for a moment,
or until it has waited long enough, and any other word to the same agent makes it obsolete.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")

QUIET_S = 0.3
LONGEST_S = 4.0  # well within the time that a client waits for its first answer


class Lull(Generic[K, V]):
    """The last word to each, given to `deliver` in the order in which they first had one to wait for."""

    def __init__(self, deliver: Callable[[K, V], None]) -> None:
        self._deliver = deliver
        self._held: dict[K, V] = {}
        self._began_at = self._stirred_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, to: K, word: V) -> None:
        loop = asyncio.get_running_loop()
        self._held[to] = word
        self._stirred_at = loop.time()
        if self._timer is None:
            self._began_at = self._stirred_at
            self._timer = loop.call_at(self._stirred_at + QUIET_S, self._look)

    def drop(self, to: K) -> None:
        self._held.pop(to, None)

    def close(self) -> None:
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """One timer, set anew when it rings too early: to move it with each word would cost more than the words."""
        loop = asyncio.get_running_loop()
        due = min(self._stirred_at + QUIET_S, self._began_at + LONGEST_S)
        if self._held and loop.time() < due:
            self._timer = loop.call_at(due, self._look)
            return
        self._timer = None
        held, self._held = self._held, {}
        for to, word in held.items():
            self._deliver(to, word)
