"""Ends slow work before the start of the ranks when a signal asks the agent to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.exchange import CheckpointSignal, StopRequested

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from launcher.exchange import AgentEvent

T = TypeVar("T")


async def unless_stopped(
    work: Coroutine[Any, Any, T], events: asyncio.Queue[AgentEvent]
) -> T | StopRequested:
    """Return the result of the work, or cancel it and return the request that came first. All events
    remain in the queue.
    """
    working, asked = asyncio.create_task(work), asyncio.create_task(_stop_in(events))
    try:
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else asked.result()
    finally:
        working.cancel()
        asked.cancel()
        await asyncio.wait((working, asked))


async def _stop_in(events: asyncio.Queue[AgentEvent]) -> StopRequested:
    seen: list[AgentEvent] = []
    try:
        while True:
            event = await events.get()
            seen.append(event)
            stop = event.stop if isinstance(event, CheckpointSignal) else event
            if isinstance(stop, StopRequested):
                return stop
    finally:
        for event in seen:
            events.put_nowait(event)
