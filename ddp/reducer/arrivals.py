"""Count gradients in the hooks of all parameters, and call the reducer only when a chunk is complete.

A call of Python costs more than the arrival of a small gradient, so a hook only counts. The counter is armed in the
forward of a step that is averaged, and disarmed when the averages are there. While it is armed, a hook calls

    begin(index)            for the first gradient
    chunk_complete(chunk)   for the last gradient that a chunk waits for
    surplus(index)          for a gradient that is not expected any more

While it is not armed, a hook calls `local(index)` if `watch` asked for that, otherwise nothing: the gradient stays on
this rank. Neither the thread nor the backward that computes a gradient makes a difference.

The class exists twice: here, and compiled (`_core/arrivals.c`), which takes a sixth of the time.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[int], None]

# The expected number of gradients if it is not known yet. Then the order is that of first gradients.
ANY_NUMBER = 0x7FFFFFFE


class Arrivals(Protocol):
    """Counts the gradients of a step."""

    def hook(self, index: int, parameter: Any) -> Callable[..., None]:
        """Return the hook of a parameter."""
        ...

    def plan(self, expected: list[int], chunk_of: list[int], n_chunks: int, exact: bool) -> None:
        """Set how often the gradient of each parameter arrives in a step, and its chunk. Disarm the counter.

        `exact`: also while it is not armed, count parameters as used only if they have a gradient.
        """
        ...

    def arm(self) -> None:
        """Count from zero."""
        ...

    def settle(self, indices: list[int]) -> list[int]:
        """Do not wait for the gradients of these parameters. Return the chunks that are complete now."""
        ...

    def disarm(self) -> list[int]:
        """Stop counting. Return the parameters in the order in which their last expected gradient arrived."""
        ...

    def left(self) -> list[int]:
        """Return how many gradients of each parameter have not arrived."""
        ...

    def take_used(self) -> list[int]:
        """Return 1 for each parameter with a gradient since the last call, armed or not."""
        ...

    def watch(self, wanted: bool) -> None:
        """Set whether gradients are reported that arrive while the counter is not armed."""
        ...


class PythonArrivals:
    """The counter in Python: used without the compiled one, and the tests compare both."""

    def __init__(self, begin: Call, chunk_complete: Call, surplus: Call, local: Call) -> None:
        self._calls = begin, chunk_complete, surplus, local
        self._lock = threading.Lock()
        self._armed = self._begun = self._watched = self._exact = False
        self._expected: list[int] = []
        self._chunk_of: list[int] = []
        self._members: list[int] = []
        self._left: list[int] = []
        self._waiting: list[int] = []
        self._order: list[int] = []
        self._used: list[int] = []

    def hook(self, index: int, parameter: Any) -> Callable[..., None]:
        begin, chunk_complete, surplus, local = self._calls

        def call(*_ignored: Any) -> None:
            with self._lock:
                if index >= len(self._expected):
                    return
                if self._exact and not self._armed and parameter.grad is None:
                    return
                self._used[index] = 1
                armed, first = self._armed, not self._begun
                self._begun |= armed
            if not armed:
                if self._watched:
                    local(index)
                return
            if first:
                begin(index)
            arrived, chunk = self._count(index)
            if not arrived:
                surplus(index)
            elif chunk is not None:
                chunk_complete(chunk)

        return call

    def _count(self, index: int) -> tuple[bool, int | None]:
        """Return whether the gradient was expected, and the chunk that it completes."""
        with self._lock:
            if not self._armed:
                return True, None
            if self._left[index] <= 0:
                return False, None
            self._left[index] -= 1
            left = self._left[index]
            if not left or left == ANY_NUMBER - 1:
                self._order.append(index)
            if left:
                return True, None
            chunk = self._chunk_of[index]
            self._waiting[chunk] -= 1
            return True, None if self._waiting[chunk] else chunk

    def plan(self, expected: list[int], chunk_of: list[int], n_chunks: int, exact: bool) -> None:
        with self._lock:
            self._exact = exact
            if len(self._used) != len(expected):
                self._used = [0] * len(expected)
            self._expected, self._chunk_of, self._armed = list(expected), list(chunk_of), False
            self._left, self._order, self._waiting = [0] * len(expected), [], [0] * n_chunks
            self._members = [0] * n_chunks
            for chunk in chunk_of:
                self._members[chunk] += 1

    def arm(self) -> None:
        with self._lock:
            self._left, self._waiting, self._order = list(self._expected), list(self._members), []
            self._armed, self._begun = True, False

    def settle(self, indices: Sequence[int]) -> list[int]:
        complete = []
        with self._lock:
            for index in indices:
                self._left[index] = 0
                chunk = self._chunk_of[index]
                self._waiting[chunk] -= 1
                if not self._waiting[chunk]:
                    complete.append(chunk)
        return complete

    def disarm(self) -> list[int]:
        with self._lock:
            self._armed = False
            return list(self._order)

    def left(self) -> list[int]:
        return list(self._left)

    def take_used(self) -> list[int]:
        with self._lock:
            used, self._used = self._used, [0] * len(self._used)
            return used

    def watch(self, wanted: bool) -> None:
        self._watched = wanted


def new_counter(begin: Call, chunk_complete: Call, surplus: Call, local: Call) -> Arrivals:
    """Return a counter: the compiled one if it is installed."""
    try:
        kind = import_module("ddp.reducer._arrivals").Arrivals
    except ImportError:
        kind = PythonArrivals
    counter: Arrivals = kind(begin, chunk_complete, surplus, local)
    return counter
