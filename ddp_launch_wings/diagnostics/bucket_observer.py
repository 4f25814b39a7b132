"""The base of all diagnostics: an observer between the reducer and the object that sends its buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.reducer.bucket_sender import BucketOperations, Used
    from ddp.reducer.reducer import Reducer


class BucketObserver:
    """Is called with each bucket before the sender. Several observers form a chain."""

    not_capturable = ""  # why a step must not be captured in a graph while this observer is active

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def begin(self) -> None:
        self._next: BucketOperations = self.reducer.operations
        self.reducer.operations = self
        self.reducer.stopwatch.add_listener(self.mark)

    def end(self) -> None:
        self.reducer.stopwatch.remove_listener(self.mark)
        if self.reducer.operations is self:
            self.reducer.operations = self._next
            return
        before: Any = self.reducer.operations
        while before._next is not self:
            before = before._next
        before._next = self._next

    def why_not_capturable(self) -> str:
        """Why a step cannot be captured while this observer, or one behind it, is active; empty if it can."""
        behind: Callable[[], str] = getattr(self._next, "why_not_capturable", str)
        return self.not_capturable or behind()

    def mark(self, name: str) -> None:
        """Called when a stage of the step begins or ends."""

    def gather(self, number: int, start: int, end: int) -> None:
        self._next.gather(number, start, end)

    def launch(self, number: int) -> Any:
        return self._next.launch(number)

    def finish(self, number: int, work: Any, used: Used) -> None:
        self._next.finish(number, work, used)
