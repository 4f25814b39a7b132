"""Launch full buckets in the order of the plan, from any thread, one at a time.

Autograd runs the hooks of each device on a thread of this device. The thread that fills the next bucket launches it
and every full bucket behind it. Other threads leave their full buckets to this thread, and continue their backward.
The lock is not held during a launch: a communication hook may take long, or wait for another device.

An error in a launch is raised in the thread that launches, so it ends the backward. The other threads may continue to
launch: the other ranks wait for these buckets. `works` has one entry per bucket. A Work therefore always belongs to its
bucket.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ddp.reducer.launch_order import LaunchOrder
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LaunchQueue:
    """The buckets of one round. `lock` guards the state of the round, including this queue."""

    def __init__(self, sizes: Sequence[int], lock: threading.Condition) -> None:
        self.works: list[Any] = [None] * len(sizes)
        self._order = LaunchOrder(sizes)
        self._lock = lock
        self._launcher = 0

    @property
    def has_full(self) -> bool:
        """Whether a call of `launch_full` may be useful. It needs no lock: the thread that fills a bucket sees it."""
        return self._order.may_launch

    @property
    def complete(self) -> bool:
        with self._lock:
            return self._order.complete

    def filled(self, bucket: int, count: int) -> None:
        """Record gathered gradients. The caller holds the lock, and calls `launch_full` after it releases the lock."""
        self._order.arrived(bucket, count)

    def launch_full(self, launch: Callable[[int], Any]) -> None:
        """Launch the full buckets, unless another thread is launching. That thread then launches them too."""
        with self._lock:
            bucket = self._claim()
        while bucket is not None:
            try:
                self.works[bucket] = launch(bucket)
            except BaseException:
                self._release()
                raise
            with self._lock:
                self._release()
                bucket = self._claim()

    def wait_for_launcher(self) -> None:
        """Wait until no other thread is launching."""
        with self._lock:
            if self._order.is_launching and self._launcher == threading.get_ident():
                raise WrongUse(
                    "a communication hook ended a backward pass of the model whose bucket it averages. Do not run this "
                    "model in its own hook."
                )
            self._lock.wait_for(lambda: not self._order.is_launching)

    def _claim(self) -> int | None:
        bucket = self._order.claim()
        if bucket is not None:
            self._launcher = threading.get_ident()
        return bucket

    def _release(self) -> None:
        with self._lock:
            self._order.release()
            self._lock.notify_all()
