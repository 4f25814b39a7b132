"""Tasks that run beside the agent's main loop. Each one ends with one fact, even if a part of it fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from launcher.exchange import LastSeen, RanksSeen, StacksTaken, StoreReached
from launcher.joining import addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import Fact
    from launcher.health.communication import CommunicationWatch
    from launcher.health.watch import HangWatch
    from launcher.ranks.worker import Workers
    from rendezvous.values.types import Assignment, Cause, StoreAddress


class Errands:
    def __init__(
        self,
        boundary: ErrorBoundary,
        ranks: Workers,
        communication: CommunicationWatch,
        hangs: HangWatch,
        happened: Callable[[Fact], None],
    ) -> None:
        self._boundary, self._ranks, self._hangs = boundary, ranks, hangs
        self._communication, self._happened = communication, happened
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(errand)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reach_store(self, node: str, assignment: Assignment, store: StoreAddress) -> None:
        """Check the connection before the ranks start: each of them would need minutes to report the same."""
        looking = addresses.obstacle_to(store.host, store.port, listens=store.kept)
        obstacle = await self._boundary.awaited("checking the connection to the store", looking, "")
        if obstacle:
            obstacle = addresses.unreachable_store(
                node, assignment.store_node, store, assignment.generation, obstacle
            )
        self._happened(StoreReached(assignment.generation, obstacle))

    async def look_at_ranks(self, generation: int) -> None:
        seen = self._boundary.called("checking the ranks", self._hangs.reports, ())
        reading = self._communication.with_recorders(generation, seen)
        told = await self._boundary.awaited("reading the flight recorders", reading, seen)
        self._happened(RanksSeen(generation, told))

    def look_back(self, generation: int) -> None:
        seen = self._boundary.called("checking the ranks", self._hangs.reports, ())
        self._happened(LastSeen(generation, seen))

    async def take_stacks(self, generation: int, cause: Cause) -> None:
        stacks = self._ranks.with_stacks(cause)
        cause = await self._boundary.awaited("taking stacks", stacks, cause)
        dumps = self._communication.with_dumps(generation, cause)
        cause = await self._boundary.awaited("reading the flight recorders", dumps, cause)
        self._happened(StacksTaken(generation, cause))
