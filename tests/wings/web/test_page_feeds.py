"""The feeds of the page: a job that answers late delays only those who look at it."""

from __future__ import annotations

import asyncio
from typing import Any

from ddp_launch_wings.web.feed import Feeds
from rendezvous.pb import rendezvous_pb2 as pb


class _Caller:
    """The service. `slow` answers when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked: list[str] = []

    async def call(self, method: str, request: Any, **_: Any) -> Any:
        assert method == "GetJob"
        self.asked.append(request.job_id)
        if request.job_id == "slow":
            await self.released.wait()
        ended = pb.JobSummary(job_id=request.job_id, phase=pb.PHASE_ENDED)
        return pb.GetJobResponse(job=pb.JobView(summary=ended))

    async def notes(self, job_id: str, *, follow: bool) -> Any:
        await asyncio.Event().wait()
        yield None

    async def all_jobs(self) -> list[Any]:
        return []


def test_a_job_that_answers_late_delays_only_those_who_look_at_it() -> None:
    async def story() -> None:
        caller = _Caller()
        feeds = Feeds(caller)
        both = [asyncio.create_task(feeds.of("slow")) for _ in range(2)]
        async with asyncio.timeout(60.0):
            fast = await feeds.of("fast")
            assert await feeds.of("fast") is fast
            assert not any(task.done() for task in both)
            caller.released.set()
            first, second = await asyncio.gather(*both)
        assert first is second
        await feeds.close()

    asyncio.run(story())
