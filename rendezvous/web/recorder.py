"""Records the figures of all jobs over time, also while nobody looks.

They come from the state of the jobs, so no agent is asked. One pass takes milliseconds. If it takes longer, because
there are many jobs, the next one comes later: recording costs at most a few thousandths of the time of the service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from rendezvous.codec import decode
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.rank_time import JobTime
from rendezvous.web.figures import Series, point_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.control.asking import Caller
    from rendezvous.web.figures import Point

_EVERY_S = 5.0  # as the agents report
_SHARE = 0.005
_log = logging.getLogger("rendezvous")


class Recorder:
    """`then` is called after each pass. `only`: the job, if there is just one."""

    def __init__(
        self,
        caller: Caller,
        then: Callable[[], None] = lambda: None,
        every_s: float = _EVERY_S,
        only: str = "",
    ) -> None:
        self._caller, self._then, self._every_s, self._only = caller, then, every_s, only
        self._series: dict[str, Series] = {}
        self._task: asyncio.Task[None] | None = None

    def series(self, job_id: str) -> Series:
        return self._series.get(job_id, Series())

    def offer(self, job_id: str, point: Point) -> None:
        self._series[job_id] = self.series(job_id).offered(point)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="figures of the page")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._look()
                self._then()
            except grpc.aio.AioRpcError as error:
                _log.debug("the page cannot record figures now: %s", error.details())
            except Exception:  # the page must not end because of one job
                _log.exception("internal error: the page could not record figures")
            await asyncio.sleep(max(self._every_s, (loop.time() - began) / _SHARE))

    async def _look(self) -> None:
        if self._only:
            await self._record(self._only)
            return
        jobs = await self._caller.all_jobs()
        self._series = {job.job_id: self.series(job.job_id) for job in jobs}
        for job in jobs:
            if job.phase != pb.PHASE_ENDED:
                await self._record(job.job_id)

    async def _record(self, job_id: str) -> None:
        try:
            view = (await self._caller.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
        except grpc.aio.AioRpcError:
            return  # it has ended, or another replica owns it now
        if view.HasField("time"):
            point = point_of(time.time(), view.summary.generation, decode(JobTime, view.time), view.ranks)
            self.offer(job_id, point)
