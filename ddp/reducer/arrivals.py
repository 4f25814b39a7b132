"""Count gradients in the hooks of all parameters, and call the reducer only when a chunk is complete.

With a hook on every parameter, a call of the reducer costs more than the arrival of a small gradient. Once a backward
has begun and nothing unusual can follow, its round arms this counter. From then on a hook only counts. It calls

    chunk_complete(chunk)   for the last gradient that a chunk waits for
    arrived(index)          for every other gradient that it does not count: it is not armed, the gradient belongs to
                            another task of the engine, or it is one that the round does not wait for

`take` ends the counting, and returns what was counted. The round then counts by itself.

The class exists twice: here, and compiled (`_core/arrivals.c`), which takes a sixth of the time.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Arrivals(Protocol):
    """Counts the gradients of one task of the engine."""

    def hook(self, index: int) -> Callable[..., None]:
        """Return the hook of a parameter."""
        ...

    def arm(self, task: int, states: list[int], chunk_of: list[int], waiting: list[int]) -> None:
        """Count the gradients of a task.

        `states` has 0 for each parameter whose gradient is to be counted, otherwise 1. `waiting` has the number of
        gradients that each chunk waits for.
        """
        ...

    def take(self) -> tuple[list[int], list[int]] | None:
        """Stop counting. Return the counted parameters in order, and `waiting`; None if it was not armed."""
        ...


class PythonArrivals:
    """The counter in Python: used without the compiled one, and the tests compare both."""

    def __init__(
        self,
        current_task: Callable[[], int],
        arrived: Callable[[int], None],
        chunk_complete: Callable[[int], None],
    ) -> None:
        self._current_task, self._arrived, self._chunk_complete = current_task, arrived, chunk_complete
        self._lock = threading.Lock()
        self._armed = False
        self._task = -1
        self._states: list[int] = []
        self._chunk_of: list[int] = []
        self._waiting: list[int] = []
        self._order: list[int] = []

    def hook(self, index: int) -> Callable[..., None]:
        def call(*_ignored: Any) -> None:
            counted, chunk = self._count(index)
            if not counted:
                self._arrived(index)
            elif chunk is not None:
                self._chunk_complete(chunk)

        return call

    def _count(self, index: int) -> tuple[bool, int | None]:
        with self._lock:
            if not self._armed or self._states[index] or self._current_task() != self._task:
                return False, None
            self._states[index] = 1
            self._order.append(index)
            chunk = self._chunk_of[index]
            self._waiting[chunk] -= 1
            return True, None if self._waiting[chunk] else chunk

    def arm(self, task: int, states: list[int], chunk_of: list[int], waiting: list[int]) -> None:
        with self._lock:
            self._task, self._states, self._chunk_of = task, list(states), chunk_of
            self._waiting, self._order, self._armed = list(waiting), [], True

    def take(self) -> tuple[list[int], list[int]] | None:
        with self._lock:
            if not self._armed:
                return None
            self._armed = False
            return self._order, self._waiting


def new(
    current_task: Callable[[], int], arrived: Callable[[int], None], chunk_complete: Callable[[int], None]
) -> Arrivals:
    """Return a counter: the compiled one if it is installed."""
    try:
        kind = import_module("ddp.reducer._arrivals").Arrivals
    except ImportError:
        kind = PythonArrivals
    counter: Arrivals = kind(current_task, arrived, chunk_complete)
    return counter
