"""An executor for the event loop. The process can end while its threads still run.

A lookup at a slow resolver, a read from a dead file server or a call into a driver that hangs cannot be cancelled. The
default executor joins its threads before the process ends, so Ctrl-C would wait for them. With this executor,
`asyncio.to_thread` and the lookups of the event loop run in daemon threads, which are not joined.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Let the loop call a function. Any thread may ask for it, also when the loop has ended: then nothing happens."""
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(function, *args)


class DaemonThreads(ThreadPoolExecutor):  # asyncio accepts only this class of executor
    """Starts a thread for each call: calls are few, and a call that hangs must not delay the next one."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="to_thread", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: threads are not joined."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with these threads."""

    async def entered() -> T:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        return await main

    return asyncio.run(entered())
