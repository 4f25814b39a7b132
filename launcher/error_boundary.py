"""The error boundary of diagnostics: it logs an error and returns a substitute for the result.

Stacks, dumps, health checks and pre-flight checks read data that ranks, drivers and the Linux kernel wrote. An error in
them must not end the agent, because that ends the job. Decisions do not run inside the boundary: an error in a decision
must be visible.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

# An executor for the event loop. The process can end while its threads still run.
#
# A lookup at a slow resolver, a read from a dead file server or a call into a driver that hangs cannot be cancelled.
# The default executor joins its threads before the process ends, so Ctrl-C would wait for them. With this executor,
# `asyncio.to_thread` and the lookups of the event loop run in daemon threads, which are not joined.

P = ParamSpec("P")


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


T = TypeVar("T")
S = TypeVar("S")
_SHOWN_CHARS = 300


class ErrorBoundary:
    """`log` writes one line and can be called from any thread. The same error of a diagnostic is logged once."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log_line = log
        self._logged: set[tuple[str, str]] = set()

    async def awaited(self, what: str, work: Awaitable[T], otherwise: S) -> T | S:
        try:
            return await work
        except Exception as error:
            self._log(what, error)
            return otherwise

    def called(self, what: str, work: Callable[[], T], otherwise: S) -> T | S:
        try:
            return work()
        except Exception as error:
            self._log(what, error)
            return otherwise

    def _log(self, what: str, error: Exception) -> None:
        where = _where(error)
        if (what, where) not in self._logged:
            self._logged.add((what, where))
            text = " ".join(str(error).split())[:_SHOWN_CHARS]
            self._log_line(
                f"ddp-launch: {what} failed and was skipped ({type(error).__name__} at {where}: {text}); "
                "the job is not affected"
            )


def _where(error: Exception) -> str:
    """Return the innermost frame, because a bug report needs it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown"
