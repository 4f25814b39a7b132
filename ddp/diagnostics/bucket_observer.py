"""The base of all diagnostics: an observer between the reducer and the object that sends its buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.bucket import Used
    from ddp.reducer.bucket_sender import Carrying
    from ddp.reducer.reducer import Reducer


class BucketObserver:
    """See each bucket on its way from the reducer to its sender. Several observers form a chain."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def begin(self) -> None:
        self._next: Carrying = self.reducer.setup.carrying
        self.reducer.setup.carrying = self
        self.reducer.stopwatch.tell(self.mark)

    def end(self) -> None:
        self.reducer.stopwatch.forget(self.mark)
        if self.reducer.setup.carrying is self:
            self.reducer.setup.carrying = self._next
            return
        before: Any = self.reducer.setup.carrying
        while before._next is not self:
            before = before._next
        before._next = self._next

    def mark(self, name: str) -> None:
        """Called when a stage of the step begins or ends."""

    def gather(self, number: int, start: int, end: int, before: Sequence[Any] | None) -> None:
        self._next.gather(number, start, end, before)

    def launch(self, number: int) -> Any:
        return self._next.launch(number)

    def finish(self, number: int, work: Any, used: Used) -> None:
        self._next.finish(number, work, used)
