"""Tasks that run beside the agent's main loop. Each task reports exactly one event, even if a part of it fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from launcher.exchange import Inspected, LastInspected, StacksTaken, StoreReached
from launcher.joining import addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent
    from launcher.health.communication import CommunicationWatch
    from launcher.health.watch import HangWatch
    from launcher.ranks.worker import Workers
    from rendezvous.values.types import Assignment, Cause, StoreAddress


class BackgroundTasks:
    def __init__(
        self,
        boundary: ErrorBoundary,
        ranks: Workers,
        communication: CommunicationWatch,
        hangs: HangWatch,
        happened: Callable[[AgentEvent], None],
    ) -> None:
        self._boundary, self._ranks, self._hangs = boundary, ranks, hangs
        self._communication, self._happened = communication, happened
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reach_store(self, node: str, assignment: Assignment, store: StoreAddress) -> None:
        """Check the connection before the ranks start: a rank reports a connection error only after minutes."""
        looking = addresses.obstacle_to(store.host, store.port, listens=store.kept)
        obstacle = await self._boundary.awaited("checking the connection to the store", looking, "")
        if obstacle:
            obstacle = addresses.unreachable_store(
                node, assignment.store_node, store, assignment.generation, obstacle
            )
        self._happened(StoreReached(assignment.generation, obstacle))

    async def inspect_ranks(self, generation: int) -> None:
        seen = self._boundary.called("reading the state of the ranks", self._hangs.reports, ())
        reading = self._communication.with_recorders(generation, seen)
        told = await self._boundary.awaited("reading the flight recorder dumps", reading, seen)
        self._happened(Inspected(generation, told))

    def inspect_last(self, generation: int) -> None:
        seen = self._boundary.called("reading the state of the ranks", self._hangs.reports, ())
        self._happened(LastInspected(generation, seen))

    async def take_stacks(self, generation: int, cause: Cause) -> None:
        stacks = self._ranks.with_stacks(cause)
        cause = await self._boundary.awaited("taking the stacks of a rank", stacks, cause)
        dumps = self._communication.with_dumps(generation, cause)
        cause = await self._boundary.awaited("reading the flight recorder dumps", dumps, cause)
        self._happened(StacksTaken(generation, cause))
