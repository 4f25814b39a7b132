"""Ends slow work before the start of the ranks when a signal asks the agent to stop, and hears those for the zygote."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from launcher.exchange import AgentEvent, CheckpointSignal, StopRequested

T = TypeVar("T")
_OWN_SIGNAL_S = 0.5  # a signal to all processes of a job has reached the agent by then


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


class ParentSignals:
    """A rank that signals its parent stops the job, as under torchrun, where the parent is the launcher itself."""

    def __init__(
        self, stops: Collection[int], trains: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._stops, self._trains, self._say = stops, trains, say
        self._is_sent = False  # the job ends: its ranks may still train when the next signal comes

    def sent(self, signum: int, local_rank: int | None) -> None:
        if local_rank is not None:
            self._stop(signum, f" of local rank {local_rank}")
        else:
            asyncio.get_running_loop().call_later(_OWN_SIGNAL_S, self._stop, signum, "")

    def _stop(self, signum: int, of_rank: str) -> None:
        """Handle it as a signal to the agent, but not as a second one, which would kill the ranks at once."""
        if signum in self._stops and self._trains() and not self._is_sent:
            self._is_sent = True
            self._say(f"ddp-launch: the parent process{of_rank} received {signal.Signals(signum).name}")
            os.kill(os.getpid(), signum)
