"""Work that may block, in a thread that nobody has to wait for: what a dead disk or link holds up must not keep a
process from ending, as asyncio's own threads would."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def aside(work: Callable[[], T], name: str) -> T:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended without us
            loop.call_soon_threadsafe(deliver, result, failed)

    threading.Thread(target=run, name=f"pre-flight: {name}", daemon=True).start()
    return await answer
