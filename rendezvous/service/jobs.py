"""All the jobs that this replica speaks for: opened from the store, closed when lost or over, forgotten in the end.

A job is opened when an agent joins it, when somebody asks about it, when the service starts, and when the
replica that had it is gone. One that is over, and that nobody looks at, is closed after a minute: its
history stays in the store until its days are up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rendezvous.service.job import Job
from rendezvous.service.limits import LimitReached
from rendezvous.session_replay import Redirect
from rendezvous.store.protocol import Deposed, StoreError
from rendezvous.store.protocol import LimitReached as ValuesFull
from rendezvous.values.state import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rendezvous.metrics import Metrics
    from rendezvous.service.limits import Limits
    from rendezvous.store.protocol import Store

_log = logging.getLogger("rendezvous")

RESERVED = "rendezvous/"  # keys that scripts cannot use
_ENDED_AT = RESERVED + "ended-at"
_IDLE_S = 60.0
_TEND_EVERY_S = 10.0
_HISTORY_EVERY_S = 3600.0
_REFUSALS = (Deposed, StoreError)


class Elsewhere(Exception):
    """Another replica decides about the job; `address` may be empty while none does."""

    def __init__(self, address: str) -> None:
        super().__init__(f"another replica decides about this job: {address or 'not known yet'}")
        self.address = address


class Jobs:
    def __init__(
        self, store: Store, limits: Limits, metrics: Metrics, *, history_s: float, resume_grace_s: float
    ) -> None:
        self._store, self._limits, self._metrics = store, limits, metrics
        self._history_s, self._resume_grace_s = history_s, resume_grace_s
        self._open: dict[str, Job] = {}
        self._opening: dict[str, asyncio.Task[Job]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._over_since: dict[str, float] = {}  # as far as it could not be written down
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        store.ownership.listen(self._lost, self._freed)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    # --- opening -----------------------------------------------------------------------------------

    def at_hand(self, job_id: str) -> Job | None:
        """Without waiting, if it is open: the way of all but the first agent."""
        return self._open.get(job_id)

    async def open(self, job_id: str) -> Job:
        """Raises `Elsewhere`, `LimitReached`, `StoreError`."""
        if (job := self._open.get(job_id)) is not None:
            return job
        if (leaving := self._leaving.get(job_id)) is not None:
            await asyncio.wait([leaving])
        task = self._opening.get(job_id)
        if task is None:
            task = self._opening[job_id] = asyncio.get_running_loop().create_task(self._load(job_id))
            task.add_done_callback(lambda _: self._opening.pop(job_id, None))
        await asyncio.wait([task])
        return task.result()

    async def _load(self, job_id: str) -> Job:
        if self.draining:
            raise Elsewhere("")
        if sum(1 for job in self if job.state.phase is not Phase.ENDED) >= self._limits.jobs:
            raise LimitReached(f"the service has {self._limits.jobs} jobs already")
        owner = await self._store.ownership.claim(job_id)
        if not owner.is_me:
            raise Elsewhere(owner.address)
        job = Job(
            job_id, self._store.job(job_id), self._store.ownership.holds, self._metrics, self._resume_grace_s
        )
        try:
            await job.loaded()
        except Deposed as error:
            raise Elsewhere("") from error
        self._open[job_id] = job
        job.task.add_done_callback(lambda task: self._ended(job, task))
        return job

    async def find(self, job_id: str) -> Job | None:
        """A job that somebody asks about: it must exist."""
        if job_id not in self._open and job_id not in await self._store.jobs():
            return None
        job = await self.open(job_id)
        return job if job.state.spec is not None else None

    async def known(self) -> list[str]:
        stored = await self._store.jobs()
        return sorted({*stored, *self._open})

    async def resume_all(self) -> None:
        """At the start: jobs that are not over go on, whether or not an agent comes back."""
        for job_id in await self._store.jobs():
            await self._resume(job_id)

    async def _resume(self, job_id: str) -> None:
        try:
            await self.open(job_id)
        except Elsewhere:
            pass  # its owner has it in hand
        except (LimitReached, StoreError) as error:
            _log.error("cannot open the job: %s", error, extra={"job": job_id})

    # --- losing ------------------------------------------------------------------------------------

    def _lost(self, job_id: str) -> None:
        job = self._open.pop(job_id, None)
        if job is not None:
            _log.warning("another replica decides about this job now", extra={"job": job_id})
            self._later(job.close(Redirect("", 0.05, "another replica decides about this job now")))

    def _freed(self, job_id: str) -> None:
        """Its owner is gone. One of the replicas gets it; agents that come find out which."""
        if not self.draining:
            self._later(self._resume(job_id))

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """The owner's task ends by itself only when the store refuses, another replica took over, or by a bug."""
        if task.cancelled() or self._open.get(job.job_id) is not job:
            return
        if isinstance(task.exception(), Deposed):
            self._lost(job.job_id)
            return
        _log.error("cannot go on with the job", extra={"job": job.job_id}, exc_info=task.exception())
        del self._open[job.job_id]
        self._later(job.close(Redirect("", 1.0, "the service had to give the job up for now")))

    def _later(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- closing, and forgetting -------------------------------------------------------------------

    async def tend(self) -> None:
        """Until cancelled."""
        history_at = time.monotonic()
        while True:
            now = time.monotonic()
            for job in list(self):
                if job.is_idle and now - job.idle_since > _IDLE_S and _is_over(job):
                    await self._leave(job)
            if now >= history_at:
                history_at = now + _HISTORY_EVERY_S
                await self.forget_old(time.time())
            await asyncio.sleep(_TEND_EVERY_S)

    async def _leave(self, job: Job) -> None:
        """Whoever asks for the job meanwhile waits, and finds it put away."""
        task = asyncio.get_running_loop().create_task(self._put_away(job))
        self._leaving[job.job_id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except _REFUSALS as error:
            _log.warning("the job cannot be put away: %s", error, extra={"job": job.job_id})
        finally:
            del self._leaving[job.job_id]

    async def _put_away(self, job: Job) -> None:
        del self._open[job.job_id]
        blank = job.state.spec is None
        await job.close(Redirect("", 0.0, "the job is over"))
        if blank:
            await self._store.forget(job.job_id)
        else:
            await self._over_at(job.job_id, time.time())
        await self._store.ownership.release(job.job_id)

    async def _over_at(self, job_id: str, now: float) -> float:
        """When it was first seen to be over."""
        values = self._store.values(job_id)
        known = await values.get(_ENDED_AT)
        if known is not None:
            return float(known.data)
        try:
            await values.put(_ENDED_AT, str(now).encode())
        except ValuesFull:
            return self._over_since.setdefault(job_id, now)
        return now

    async def forget_old(self, now: float) -> None:
        """Also what other replicas have left behind. What one job's store says against it concerns that job only."""
        try:
            stored = await self._store.jobs()
        except StoreError as error:
            _log.warning("the history cannot be looked through: %s", error)
            return
        for job_id in stored:
            try:
                await self._forget_if_old(job_id, now)
            except _REFUSALS as error:
                _log.warning("it stays in the history for now: %s", error, extra={"job": job_id})

    async def _forget_if_old(self, job_id: str, now: float) -> None:
        if job_id in self._open or job_id in self._opening:
            return
        owner = await self._store.ownership.owner_of(job_id)
        if owner is not None and owner.address and not owner.is_me:
            return
        state, _ = await self._store.job(job_id).load()
        if state.outcome is None and state.spec is not None:
            return
        if state.spec is None or now - await self._over_at(job_id, now) > self._history_s:
            await self._store.forget(job_id)
            self._over_since.pop(job_id, None)

    async def close(self, after_s: float) -> None:
        """No decision is made of it: agents go elsewhere, or come back; jobs stay as they are in the store."""
        self.draining = True
        jobs = list(self)
        self._open.clear()
        for job in jobs:
            await job.close(Redirect("", after_s, "the service is going away"))
            await self._store.ownership.release(job.job_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)


def _is_over(job: Job) -> bool:
    return job.state.phase is Phase.ENDED or job.state.spec is None
