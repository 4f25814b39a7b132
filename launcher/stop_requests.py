"""Ends slow work before the start of the ranks when a signal asks the agent to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.exchange import CheckpointSignal, StopRequested

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from launcher.exchange import Fact

T = TypeVar("T")


async def unless_stopped(work: Coroutine[Any, Any, T], facts: asyncio.Queue[Fact]) -> T | StopRequested:
    """Return the result of the work, or cancel it and return the request that came first. All facts stay queued."""
    working, asked = asyncio.create_task(work), asyncio.create_task(_stop_in(facts))
    try:
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else asked.result()
    finally:
        working.cancel()
        asked.cancel()
        await asyncio.wait((working, asked))


async def _stop_in(facts: asyncio.Queue[Fact]) -> StopRequested:
    seen: list[Fact] = []
    try:
        while True:
            fact = await facts.get()
            seen.append(fact)
            stop = fact.stop if isinstance(fact, CheckpointSignal) else fact
            if isinstance(stop, StopRequested):
                return stop
    finally:
        for fact in seen:
            facts.put_nowait(fact)
