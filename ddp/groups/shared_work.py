"""The Work object of an operation in the compiled core.

The operations of a group run in the order of their sequence numbers (tickets). A thread that waits gets the result from
the core. One thread per group completes futures. It starts when the first future is requested.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp.telemetry.coded import WrongUse

FAILED, NOT_YET = -1, -2  # otherwise 0
_FOREVER_S = 1e9
_NO_TIMEOUT = timedelta(0)


class Core(Protocol):
    """The interface of the compiled class ddp.groups._native.Group."""

    def post(
        self,
        kind: int,
        element: int,
        reduction: int,
        root: int,
        count: int,
        divisor: float,
        timeout_s: float,
        at_once: bool,
        given: list[int],
        got: list[int],
        tag: int,
        /,
    ) -> int: ...
    def wait(self, ticket: int, timeout_s: float, may_execute: bool, /) -> int: ...
    def all_reduce(
        self, element: int, reduction: int, divisor: float, timeout_s: float, address: int, size: int, /
    ) -> int: ...
    def state(self, ticket: int, /) -> int: ...
    def want(self, ticket: int, /) -> None: ...
    def failure(self) -> str: ...
    def allocate(self, size: int, /) -> Any: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class InFlight:
    """The pending operations of a group: keeps their tensors alive, and completes their futures."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._works: deque[SharedWork] = deque()
        self._awaited: SimpleQueue[tuple[SharedWork, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.settling = threading.RLock()

    def add(self, work: SharedWork) -> None:
        works = self._works
        works.append(work)
        if len(works) > 8 and self.core.state(works[0].ticket) != NOT_YET:
            self.done_up_to(works[0].ticket)

    def done_up_to(self, ticket: int) -> None:
        works = self._works
        with self._lock:
            while works and works[0].ticket <= ticket:
                works.popleft()

    def promise(self, work: SharedWork, done: Any) -> None:
        if threading.current_thread() is self._thread:
            # A callback on this thread started the operation and may wait for it: only this thread completes futures.
            work.finish()
            done.set_result(None)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._complete, name="ddp-futures", daemon=True)
                self._thread.start()
        self._awaited.put((work, done))

    def _complete(self) -> None:
        while (awaited := self._awaited.get()) is not None:
            work, done = awaited
            work.finish()
            done.set_result(None)
            del work, done, awaited

    def close(self) -> None:
        """Stop the thread. Call this after the core is closed: then every operation has a result."""
        if self._thread is not None:
            self._awaited.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None
        self._works.clear()


class CollectiveWork(dist.Work):
    """The methods that all Works of a collective share."""

    __slots__ = ("_tensors",)
    _tensors: list[torch.Tensor]

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        raise WrongUse("source_rank() is valid only for a receive, not for a collective")

    def result(self) -> list[torch.Tensor]:
        return self._tensors


class SharedWork(CollectiveWork):
    """One operation of the compiled core."""

    __slots__ = ("_after", "_error", "_flight", "_future", "_kept", "_settled", "ticket")

    def __init__(
        self,
        flight: InFlight,
        ticket: int,
        tensors: list[torch.Tensor],
        kept: object,
        after: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self.ticket = ticket
        self._flight = flight
        self._tensors = tensors
        self._kept = kept
        self._after = after
        self._error: Exception | None = None
        self._settled = False
        self._future: Any = None
        flight.add(self)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._settled:
            limit = timeout.total_seconds()
            if limit > 0:
                self._await(limit, may_execute=False)
            else:
                self._await(_FOREVER_S, may_execute=True)
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Wait without raising."""
        if not self._settled:
            self._await(_FOREVER_S, may_execute=False)

    def _await(self, limit_s: float, may_execute: bool) -> None:
        state = self._flight.core.wait(self.ticket, limit_s, may_execute)
        if state == NOT_YET:
            raise dist.DistBackendError(
                f"timed out: the collective did not complete within {limit_s:g} s, because a rank has not called it. "
                "See the logs of the other ranks, or wait with a larger timeout"
            )
        self._conclude(state)

    def _conclude(self, state: int) -> None:
        self._flight.done_up_to(self.ticket)
        with self._flight.settling:
            if self._settled:
                return
            if state == FAILED:
                self._error = dist.DistBackendError(self._flight.core.failure())
            elif self._after is not None:
                self._after()
            self._after = self._kept = None
            self._settled = True

    def is_completed(self) -> bool:
        if self._settled:
            return True
        state = self._flight.core.state(self.ticket)
        if state == NOT_YET:
            self._flight.core.want(self.ticket)
            return False
        self._conclude(state)
        return True

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def get_future(self) -> Any:
        """Return a future whose error is raised in a callback.

        torch's C++ code treats an exception that is set from Python as a normal value.
        """
        if self._future is None:
            done: Any = torch.futures.Future()
            self._future = done.then(lambda _none: self._outcome())
            self._flight.core.want(self.ticket)
            self._flight.promise(self, done)
        return self._future

    def _outcome(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


class FinishedWork(CollectiveWork):
    """The Work of a synchronous operation. It has no constructor: that would take as long as the operation."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(self._tensors)
        return done


class CombinedWork(CollectiveWork):
    """Several operations as one Work."""

    def __init__(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Any:
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(self._outcome)

    def _outcome(self, together: Any) -> list[torch.Tensor]:
        for done in together.wait():
            done.wait()  # raises the error of this operation
        return self._tensors


def call_for_each(collective: Callable[..., dist.Work], outputs: Any, inputs: Any, opts: Any) -> dist.Work:
    """Call a collective for each pair of an output and an input, and return all operations as one Work."""
    works = [collective(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
    return works[0] if len(works) == 1 else CombinedWork(works, list(outputs))
