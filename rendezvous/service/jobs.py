"""The jobs that this replica owns. They are opened from the store, closed, and deleted when the history expires.

A job is opened when an agent joins it, when a client asks about it, when the service starts, and when the replica that
owned it has stopped or lost its lease. It is closed when another replica owns it. A job that has ended and has no
watchers is closed after a minute. The store keeps it for the days of `--history`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from rendezvous.access.auth import Gate, Identity, Right
from rendezvous.codec import BadMessage, question_message, read_answer, to_agent_bytes
from rendezvous.replay.journal import Journal, Journals, journal_of, name_of
from rendezvous.rounds.admission import trains
from rendezvous.rounds.event_log import Past, decode_past, encode_past
from rendezvous.rounds.sealing import fitted
from rendezvous.rounds.view import JobSummary, summary_of
from rendezvous.service import waiting_jobs
from rendezvous.service.agent_stream import (
    AgentStream,
    Allowance,
    Counts,
    LimitReached,
    ServiceLimits,
    StreamAborted,
)
from rendezvous.service.ages import Ages
from rendezvous.service.calls import Calls, NotFound, count_open
from rendezvous.service.owner import CATCH_UP_S, DELAYED_S, JobOwner, OpenJob, OwnedByOther
from rendezvous.session_replay import Redirect
from rendezvous.store.protocol import VALUE_BYTES, JobStore, OwnershipLost, Store, StoreError, ValuesFull
from rendezvous.values.events import AgentLost, Assigned, Event, Notice, Refused, ToAgent, Waiting
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import CannotAnswer, Present, Remark, RestartTimes, Told, Wanted

if TYPE_CHECKING:
    from rendezvous.metrics import Metrics
    from rendezvous.values.types import AgentId


_log = logging.getLogger("rendezvous")

RESERVED = "rendezvous/"  # keys that scripts cannot use
_ENDED_AT = RESERVED + "ended-at"
_AGE = RESERVED + "age"
_PAST = RESERVED + "past"
_PAST_AFTER_S = 1.0  # after a change: several belong together
_IDLE_S = 60.0
_MAINTAIN_EVERY_S = 10.0
_HISTORY_EVERY_S = 3600.0
_CLOSED_AT_MOST = 100  # before old jobs are deleted
_LOOK_AFTER_S = 2.0  # after a new job: for another one that waits for nodes, twice
_REFUSALS = (OwnershipLost, StoreError)


class Jobs:
    """`one_tenant`: all clients share a secret or need none, so that names of jobs may be mentioned to any of them."""

    def __init__(
        self,
        store: Store,
        limits: ServiceLimits,
        metrics: Metrics,
        *,
        history_s: float,
        history_jobs: int = 1000,
        resume_grace_s: float,
        one_tenant: bool,
        journals: Journals | None = None,
    ) -> None:
        self._store, self._limits, self._metrics = store, limits, metrics
        self._history_s, self._history_jobs = history_s, history_jobs
        self._ages = Ages(store, history_s, _AGE)
        self._resume_grace_s, self._one_tenant = resume_grace_s, one_tenant
        self._journals = journals
        self._open: dict[str, Job] = {}
        self._opening: dict[str, asyncio.Task[Job]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._over_since: dict[str, float] = {}  # for those whose end could not be written to the store
        self._hints: dict[str, str] = {}  # for jobs that wait for nodes, as of the last look
        self._mentioned: dict[str, str] = {}
        self._looks = 0
        self._next_look: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsaved: dict[str, asyncio.TimerHandle] = {}  # jobs whose past has changed
        self._closed_since = 0  # jobs that were closed since old ones were deleted
        self._unopened = UnopenedJobs(store, self._open)
        self.draining = False
        store.ownership.listen(self._lose_job, self._freed)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    # --- opening -----------------------------------------------------------------------------------

    def if_open(self, job_id: str) -> Job | None:
        """The job if it is open, without waiting: the fast path for all but the first agent."""
        return self._open.get(job_id)

    async def open(self, job_id: str) -> Job:
        """Open the job, creating it if it does not exist. Raises `OwnedByOther`, `LimitReached`, `StoreError`."""
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
            raise OwnedByOther("")
        self._check_room()
        owner = await self._store.ownership.claim(job_id)
        if not owner.is_me:
            raise OwnedByOther(owner.address)
        stored = await self._store.values(job_id).get(_PAST)
        job = Job(
            *(
                job_id,
                self._store.job(job_id),
                self._store.ownership.holds,
                self._metrics,
                self._resume_grace_s,
            ),
            None if self._journals is None else journal_of(self._journals, job_id),
        )
        if stored is not None:
            job.recall(decode_past(stored.data))
        job.on_news = partial(self._save_past_soon, job)
        try:
            await job.wait_loaded()
        except OwnershipLost as error:
            raise OwnedByOther("") from error
        if not _is_ended(job):
            try:
                self._check_room()  # others were opened at the same time
            except LimitReached:
                await job.close(Redirect("", 0.0, "the service has too many jobs"))
                await self._store.ownership.release(job_id)
                raise
        self._open[job_id] = job
        job.task.add_done_callback(lambda task: self._ended(job, task))
        self._looks = 2
        if self._next_look is None:
            self._look_later()
        return job

    def _check_room(self) -> None:
        if sum(1 for job in self if not _is_ended(job)) >= self._limits.jobs:
            raise LimitReached(
                f"the service already has {self._limits.jobs} jobs, which is the limit (--max-jobs)"
            )

    async def find(self, job_id: str) -> Job | None:
        """The job that a client asks about, or None if it does not exist."""
        if job_id not in self._open and not (await self._store.job(job_id).load())[1]:
            return None
        job = await self.open(job_id)
        return job if job.state.spec is not None else None

    async def listed(self) -> tuple[list[JobSummary], dict[str, str]]:
        """The jobs that are open here or nowhere, and the addresses of the owners of the others. Opens no job."""
        unopened = await self._unopened.now()
        others = {job_id: where for job_id, where in unopened.elsewhere.items() if job_id not in self._open}
        return list((unopened.jobs | summaries_of(self)).values()), others

    async def resume_all(self) -> None:
        """At the start, resume the jobs that have not ended, even if no agent reconnects."""
        for job_id in await self._store.jobs():
            await self._resume(job_id)

    async def _resume(self, job_id: str) -> None:
        """Open the job, unless it has ended: else each replica would open what another one has just closed."""
        try:
            state, _ = await self._store.job(job_id).load()
            if state.spec is not None and state.phase is not Phase.ENDED:
                await self.open(job_id)
        except OwnedByOther:
            pass  # its owner resumes it
        except (LimitReached, StoreError) as error:
            _log.error(
                "cannot load the job; trying again when an agent joins: %s", error, extra={"job": job_id}
            )

    def _save_past_soon(self, job: Job) -> None:
        if job.job_id not in self._unsaved:
            save = partial(self._save_past_now, job)
            self._unsaved[job.job_id] = asyncio.get_running_loop().call_later(_PAST_AFTER_S, save)

    def _save_past_now(self, job: Job) -> None:
        if self._open.get(job.job_id) is job:
            self._later(self._save_past(job))

    async def _save_past(self, job: Job) -> None:
        """What this process knows of the job beside its state, for the next one and for those who ask later."""
        timer = self._unsaved.pop(job.job_id, None)
        if timer is None or job.state.spec is None:
            return
        timer.cancel()
        try:
            data = await asyncio.to_thread(encode_past, job.past(), VALUE_BYTES)
            await self._store.values(job.job_id).put(_PAST, data)
        except (*_REFUSALS, ValuesFull) as error:
            _log.warning("cannot store the events of the job: %s", error, extra={"job": job.job_id})

    # --- losing ------------------------------------------------------------------------------------

    def _lose_job(self, job_id: str) -> None:
        job = self._open.pop(job_id, None)
        self._unopened.forget()
        if job is not None:
            _log.warning("another replica owns this job now", extra={"job": job_id})
            self._later(job.close(Redirect("", 0.05, "another replica owns this job now")))

    def _freed(self, job_id: str) -> None:
        """The owner has stopped or lost its lease: try to claim the job. Agents are redirected to the new owner."""
        if not self.draining:
            self._later(self._resume(job_id))

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """The owner task ends by itself only after a permanent store error, after a takeover, or because of a bug."""
        if task.cancelled() or self._open.get(job.job_id) is not job:
            return
        if isinstance(task.exception(), OwnershipLost):
            self._lose_job(job.job_id)
            return
        _log.error(
            "stopped serving the job after an error; it is loaded again when an agent joins",
            extra={"job": job.job_id},
            exc_info=task.exception(),
        )
        del self._open[job.job_id]
        self._later(
            job.close(
                Redirect("", 1.0, "the service had an internal error and loads the job again; see its log")
            )
        )

    def _later(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- closing and deleting ----------------------------------------------------------------------

    async def maintain(self) -> None:
        """Close idle jobs and delete old ones, until cancelled."""
        history_at = time.monotonic()
        while True:
            now = time.monotonic()
            for job in list(self):
                if job.is_idle and now - job.idle_since > _IDLE_S and _is_over(job):
                    await self._leave(job)
            self.mention_waiting_jobs()
            if now >= history_at or self._closed_since > _CLOSED_AT_MOST:
                history_at = now + _HISTORY_EVERY_S
                await self.delete_old(time.time(), time.monotonic())
            await asyncio.sleep(_MAINTAIN_EVERY_S)

    def _look_later(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(_LOOK_AFTER_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        self.mention_waiting_jobs()
        self._looks -= 1
        if self._looks:
            self._look_later()

    def mention_waiting_jobs(self) -> None:
        """Tell nodes that wait at two looks in a row about another job that waits as well.

        Once is not enough: all nodes of both jobs may just be arriving.
        """
        if not self._one_tenant:
            return
        hints = waiting_jobs.hints([_as_waiting(job) for job in self if _misses_nodes(job)])
        repeated = {job_id: text for job_id, text in hints.items() if self._hints.get(job_id) == text}
        for job_id, text in repeated.items():
            if self._mentioned.get(job_id) != text:
                self._open[job_id].notify(text)
        self._hints, self._mentioned = hints, repeated

    async def _leave(self, job: Job) -> None:
        """Close an idle job. A request for the job during that time waits until the job is closed."""
        task = asyncio.get_running_loop().create_task(self._close_idle(job))
        self._leaving[job.job_id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except _REFUSALS as error:
            _log.warning("cannot close the idle job: %s", error, extra={"job": job.job_id})
        finally:
            del self._leaving[job.job_id]

    async def _close_idle(self, job: Job) -> None:
        del self._open[job.job_id]
        self._unopened.forget()
        blank = job.state.spec is None
        await job.close(Redirect("", 0.0, "the job has ended"))
        if blank:
            await self._store.delete(job.job_id)
        else:
            await self._save_past(job)
            await self._ended_at(job.job_id, time.time())
        self._closed_since += 1
        await self._store.ownership.release(job.job_id)

    async def _ended_at(self, job_id: str, now: float) -> float:
        """The time at which a replica first saw that the job had ended."""
        values = self._store.values(job_id)
        known = await values.get(_ENDED_AT)
        if known is not None:
            return float(known.data)
        try:
            await values.put(_ENDED_AT, str(now).encode())
        except ValuesFull:
            return self._over_since.setdefault(job_id, now)
        return now

    async def delete_old(self, wall: float, monotonic: float) -> None:
        """Delete expired jobs, also those of other replicas, and those that are too many: the oldest ones first.

        After an error, continue with the next job.
        """
        self._closed_since = 0
        kept: list[tuple[float, float, str]] = []
        try:
            stored = await self._store.jobs()
        except StoreError as error:
            _log.warning(
                "cannot list the stored jobs; expired jobs are deleted at a later attempt: %s", error
            )
            return
        for job_id in stored:
            with self._next_after_refusal(job_id):
                ended_at = await self._ended_before(job_id, wall)
                if ended_at is None:
                    continue
                age_s = math.inf
                if ended_at > -math.inf:
                    age_s = await self._ages.seconds(job_id, ended_at, wall, monotonic)
                if age_s <= self._history_s:
                    kept.append((-age_s, ended_at, job_id))
                else:
                    await self._delete(job_id)
        for _, _, job_id in sorted(kept)[: max(0, len(kept) - self._history_jobs)]:
            with self._next_after_refusal(job_id):
                await self._delete(job_id)

    @contextmanager
    def _next_after_refusal(self, job_id: str) -> Iterator[None]:
        try:
            yield
        except _REFUSALS as error:
            _log.warning("cannot delete the expired job, will try again: %s", error, extra={"job": job_id})

    async def _ended_before(self, job_id: str, now: float) -> float | None:
        """When a job has ended that nobody has open; None: it may not be deleted. A blank one ended long ago."""
        if job_id in self._open or job_id in self._opening:
            return None
        owner = await self._store.ownership.owner_of(job_id)
        if owner is not None and owner.address and not owner.is_me:
            return None
        state, _ = await self._store.job(job_id).load()
        if state.spec is None:
            return -math.inf
        return None if state.outcome is None else await self._ended_at(job_id, now)

    async def _delete(self, job_id: str) -> None:
        await self._store.delete(job_id)
        self._over_since.pop(job_id, None)
        self._ages.forget(job_id)
        if self._journals is not None:
            self._journals.remove(name_of(job_id))

    async def close(self, after_s: float) -> None:
        """Redirect all agents. The jobs do not change: the store keeps them."""
        self.draining = True
        if self._next_look is not None:
            self._next_look.cancel()
        jobs = list(self)
        self._open.clear()
        for job in jobs:
            await job.close(Redirect("", after_s, "the service is shutting down"))
            await self._save_past(job)
            await self._store.ownership.release(job.job_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)


def summaries_of(jobs: Iterable[OpenJob]) -> dict[str, JobSummary]:
    return {
        job.job_id: summary_of(job.job_id, job.state, Past(job.began_at, job.ended_at))
        for job in jobs
        if job.state.spec is not None
    }


def _is_ended(job: Job) -> bool:
    return job.state.phase is Phase.ENDED


def _is_over(job: Job) -> bool:
    return job.state.phase is Phase.ENDED or job.state.spec is None


def _misses_nodes(job: Job) -> bool:
    state = job.state
    return state.phase is Phase.FORMING and state.spec is not None and len(state.members) < state.min_nodes


def _as_waiting(job: Job) -> waiting_jobs.WaitingJob:
    return waiting_jobs.WaitingJob(job.job_id, job.state.min_nodes, job.state.max_nodes)


# --- the stored jobs that are not open here: those that have ended, and those of other replicas ------
#
# Every browser lists the jobs again and again. So one look at the store serves all who ask within a second. It reads
# the names and the versions. A state is read only if its version has changed since the last look.

_LOOK_EVERY_S = 1.0
_READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Unopened:
    jobs: dict[str, JobSummary]
    elsewhere: dict[str, str]  # the address of the owner


class UnopenedJobs:
    def __init__(self, store: Store, open_here: Mapping[str, Job]) -> None:
        self._store, self._open_here = store, open_here
        self._summaries: dict[str, tuple[int, JobSummary | None]] = {}  # with the version
        self._look: asyncio.Task[Unopened] | None = None
        self._looked_at = 0.0

    def forget(self) -> None:
        """A job is open here no longer: look again at the next question."""
        self._look = None

    async def now(self) -> Unopened:
        loop, look = asyncio.get_running_loop(), self._look
        is_old = loop.time() - self._looked_at > _LOOK_EVERY_S
        if look is None or (look.done() and (is_old or look.exception() is not None)):
            look = self._look = loop.create_task(self._read(), name="list jobs")
            self._looked_at = loop.time()
        return await asyncio.shield(look)

    async def _read(self) -> Unopened:
        versions = await self._store.jobs()
        self._summaries = {
            job_id: known for job_id, known in self._summaries.items() if versions.get(job_id) == known[0]
        }
        names = [job_id for job_id in versions if job_id not in self._open_here]
        owners = {job_id: self._store.ownership.known_owner(job_id) for job_id in names}
        elsewhere = {job_id: each.address for job_id, each in owners.items() if each and not each.is_me}
        unknown = [job_id for job_id in names if job_id not in elsewhere and job_id not in self._summaries]
        for at in range(0, len(unknown), _READS_AT_ONCE):
            await asyncio.gather(*map(self._read_one, unknown[at : at + _READS_AT_ONCE]))
        found = {job_id: self._summaries[job_id][1] for job_id in names if job_id not in elsewhere}
        return Unopened({job_id: each for job_id, each in found.items() if each is not None}, elsewhere)

    async def _read_one(self, job_id: str) -> None:
        try:
            state, version = await self._store.job(job_id).load()
            stored = await self._store.values(job_id).get(_PAST)
        except StoreError as error:
            _log.warning("cannot list the job: %s", error, extra={"job": job_id})
            state, version, stored = JobState(), (await self._store.jobs()).get(job_id, 0), None
        past = decode_past(stored.data) if stored is not None else Past()
        self._summaries[job_id] = version, None if state.spec is None else summary_of(job_id, state, past)


# --- one job in the service: its owner task, the streams of its agents, and its event journal -------

_STREAM_NUMBERS_KEPT = 65_536
_UNCONFIRMED_S = 0.2
_WATCH_EVERY_S = 0.25


class Job(OpenJob):
    """One open job. `holds` returns whether this replica owns the job now. `journal` is for `ddpctl replay`."""

    def __init__(
        self,
        job_id: str,
        store: JobStore,
        holds: Callable[[str], bool],
        metrics: Metrics,
        resume_grace_s: float,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(job_id, lambda kind: metrics.count("events", kind))
        self.streams: dict[AgentId, AgentStream] = {}
        self.conversations: dict[AgentId, Conversation] = {}
        self._stream_numbers: dict[AgentId, int] = {}  # the highest number that the agent has used
        self.idle_since = time.monotonic()
        self._holds, self._metrics, self._resume_grace_s = holds, metrics, resume_grace_s
        self._journal = journal
        self._broken: dict[AgentId, float] = {}  # agents whose stream broke, and when
        self._watch: asyncio.TimerHandle | None = None
        self._last: tuple[ToAgent, bytes] | None = None
        self._coalescer: Coalescer[AgentStream, Waiting] = Coalescer(
            lambda to, message: to.put(self._encoded(message))
        )
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.owner = JobOwner(store, self._send, note=self.note, record=journal)
        self.task = asyncio.get_running_loop().create_task(self.owner.run(), name=f"job {job_id}")

    def owner_task(self) -> asyncio.Task[None]:
        return self.task

    async def wait_loaded(self) -> None:
        """Wait until the state is read. Raises the store's error if it cannot be read."""
        await asyncio.wait([self.task, self._loaded], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task

    @property
    def is_idle(self) -> bool:
        return not self.streams and not self.watchers and not self._orders

    # --- streams -----------------------------------------------------------------------------------

    def is_new_stream(self, agent: AgentId, number: int) -> bool:
        """Whether the number of the stream is new to this replica.

        Another replica may admit a replayed join. The next stream of the real agent ends such a stream.
        """
        if number <= self._stream_numbers.get(agent, 0):
            return number == 0 and agent not in self._stream_numbers
        self._stream_numbers[agent] = number
        if len(self._stream_numbers) > _STREAM_NUMBERS_KEPT:
            del self._stream_numbers[next(iter(self._stream_numbers))]
        return True

    def attach(self, stream: AgentStream) -> None:
        agent = stream.agent
        before = self.streams.get(agent)
        if before is not None:
            before.abort(StreamAborted(grpc.StatusCode.ABORTED, "the agent opened another stream"))
        self.streams[agent] = stream
        self._broken.pop(agent, None)
        if self._watch is None:
            self._watch_later(_WATCH_EVERY_S)

    def detach(self, stream: AgentStream) -> None:
        agent = stream.agent
        if self.streams.get(agent) is not stream:
            return
        del self.streams[agent]
        if (conversation := self.conversations.get(agent)) is not None:
            conversation.end()
        self._coalescer.drop(stream)
        self.idle_since = time.monotonic()
        member = self.state.members.get(agent.node)
        if stream.has_left or self.task.done() or member is None or member.agent != agent:
            return
        if stream.was_redirected:
            return  # by this replica. A crowd cannot come back within the grace, so the lease decides.
        self._broken[agent] = asyncio.get_running_loop().time()

    # --- silent agents

    def _watch_later(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_at = loop.time() + pause_s
        self._watch = loop.call_at(due_at, self._look_for_losses, due_at, pause_s)

    def _look_for_losses(self, due_at: float, waited_s: float) -> None:
        """Lose agents before their leases expire. If this process was delayed, first read what they sent."""
        self._watch = None
        now = asyncio.get_running_loop().time()
        must_read = now - due_at > DELAYED_S and waited_s < CATCH_UP_S
        if not must_read and not self.owner.backlog:
            self.lose_silent_agents(now)
        if self.streams or self._broken:
            self._watch_later(CATCH_UP_S if must_read else _WATCH_EVERY_S)

    def lose_silent_agents(self, now: float) -> None:
        """A broken stream is evidence that an agent has ended, but it may be the network, and its ranks may work on.

        So ranks that run count as lost only if their progress has stopped too. Otherwise the lease decides.
        """
        spec = self.state.spec
        grace_s = self._resume_grace_s if spec is None else min(self._resume_grace_s, spec.lease_s)
        for agent, since in self.owner.lost_early(self._broken, grace_s):
            fell_silent = "its stream broke" if agent in self._broken else "no heartbeat"
            self._lose(agent, f"{fell_silent}, and no progress of the ranks, for {now - since:.0f} s")
        for agent, broke_at in list(self._broken.items()):
            if now - broke_at >= grace_s and not trains(self.state, agent):
                self._lose(agent, f"its stream broke and it did not reconnect within {grace_s:g} s")

    def _lose(self, agent: AgentId, why: str) -> None:
        self._broken.pop(agent, None)
        self.owner.post(AgentLost(agent, why))

    def _send(self, agent: AgentId, message: ToAgent) -> None:
        stream = self.streams.get(agent)
        if stream is None:
            return
        if not self._holds(self.job_id):
            stream.redirect(
                Redirect("", _UNCONFIRMED_S, "this replica cannot confirm that it owns the job; trying again")
            )
            return
        if isinstance(message, Waiting):
            self._coalescer.put(stream, message)
        else:
            self._coalescer.drop(stream)
            stream.put(self._encoded(message))

    def notify(self, text: str) -> None:
        """Print `text` on all nodes that have joined."""
        for agent in list(self.streams):
            self._send(agent, Notice(self.state.generation, text))

    def _encoded(self, message: ToAgent) -> bytes:
        """Encode a broadcast only once. Assignments differ from node to node and are not kept."""
        if isinstance(message, Assigned):
            return to_agent_bytes(message)
        if self._last is None or self._last[0] != message:
            if isinstance(message, Refused):
                self._metrics.count("turned_away", "temporary" if message.retryable else "final")
            short = fitted(message, lambda m: len(to_agent_bytes(m)))
            self._last = (message, to_agent_bytes(short))
        return self._last[1]

    def note(self, event: Event | None, before: JobState, after: JobState) -> None:
        if event is None:
            self._last = None
            if not self._loaded.done():
                self._loaded.set_result(None)
        super().note(event, before, after)

    # --- the end -----------------------------------------------------------------------------------

    async def close(self, redirect: Redirect) -> None:
        """Give up the job, and redirect its agents."""
        for stream in list(self.streams.values()):
            stream.redirect(redirect)
        for conversation in list(self.conversations.values()):
            conversation.end()
        for watcher in self.watchers:
            watcher.job_moved = True
            watcher.put(None)
        if self._watch is not None:
            self._watch.cancel()
        self._coalescer.close()
        self.task.cancel()
        await asyncio.wait([self.task])
        if self._journal is not None:
            self._journal.end()


# --- coalesce status messages: hold them back while the status still changes ------------------------
#
# If thousands of agents join at once, a status message to each agent after each join would take O(N^2) messages. Most
# of them would be outdated before they are read. So a status message waits until no new one came for QUIET_S, and at
# most LONGEST_S. A later message to the same agent replaces it.

K = TypeVar("K")
V = TypeVar("V")

QUIET_S = 0.3
LONGEST_S = 4.0  # well below the time that a client waits for its first answer


class Coalescer(Generic[K, V]):
    """Keeps the latest message for each recipient; passes them to `deliver` in the order of the first `put`."""

    def __init__(self, deliver: Callable[[K, V], None]) -> None:
        self._deliver = deliver
        self._held: dict[K, V] = {}
        self._began_at = self._changed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, to: K, message: V) -> None:
        loop = asyncio.get_running_loop()
        self._held[to] = message
        self._changed_at = loop.time()
        if self._timer is None:
            self._began_at = self._changed_at
            self._timer = loop.call_at(self._changed_at + QUIET_S, self._flush_if_quiet)

    def drop(self, to: K) -> None:
        self._held.pop(to, None)

    def close(self) -> None:
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush_if_quiet(self) -> None:
        """Deliver, or set the timer again if a message came in the meantime. Resetting it each time would be slower."""
        loop = asyncio.get_running_loop()
        deadline = min(self._changed_at + QUIET_S, self._began_at + LONGEST_S)
        if self._held and loop.time() < deadline:
            self._timer = loop.call_at(deadline, self._flush_if_quiet)
            return
        self._timer = None
        held, self._held = self._held, {}
        for to, message in held.items():
            self._deliver(to, message)


# --- the stream on which one agent answers questions about its ranks (`Converse` of the service Agents)
#
# Answers are large and may take seconds, so they have a stream of their own: heartbeats and decisions do not wait
# behind them. Every question has one answer, at most as long as one message. A question without an answer in time
# fails for the client that asked; nothing is kept of it.

_FIRST_MESSAGE_S = 10.0
_AT_ONCE = 32  # unanswered questions of one agent
_REMARKS_PER_S, _REMARKS_AT_ONCE = 2.0, 32


class Conversation:
    def __init__(self, agent: AgentId, context: Any, remark: Callable[[Remark | RestartTimes], None]) -> None:
        self.agent = agent
        self._context, self._remark = context, remark
        self._asked: dict[int, asyncio.Future[Told]] = {}
        self._last = 0
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._allowance = Allowance(_REMARKS_PER_S, _REMARKS_AT_ONCE, at=asyncio.get_running_loop().time())

    async def ask(self, wanted: Wanted, wait_s: float) -> Told:
        """Ask, and wait for the answer."""
        if len(self._asked) >= _AT_ONCE:
            return CannotAnswer(
                f"{len(self._asked)} questions to this node are not answered yet: ask again later"
            )
        self._last += 1
        number = self._last
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(question_message(number, wanted).SerializeToString())
        try:
            return await asyncio.wait_for(answer, wait_s)
        except TimeoutError:
            return CannotAnswer(f"the agent did not answer within {wait_s:g} s")
        finally:
            del self._asked[number]

    def end(self) -> None:
        """End the stream: another replica owns the job, or the agent has opened another one."""
        self._outbox.put_nowait(None)

    async def run(self) -> None:
        reader = asyncio.get_running_loop().create_task(self._read())
        try:
            while (data := await self._outbox.get()) is not None:
                await self._context.write(data)
        except grpc.aio.BaseError:
            pass  # the client is gone
        finally:
            reader.cancel()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_result(CannotAnswer("the connection to the agent broke: ask again"))
        if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
            raise error

    async def _read(self) -> None:
        try:
            while (data := await self._context.read()) is not grpc.aio.EOF:
                self._take(*read_answer(data))
        except grpc.aio.BaseError:
            pass
        finally:
            self.end()

    def _take(self, number: int, told: Any) -> None:
        answer = self._asked.get(number)
        if isinstance(told, Remark | RestartTimes):
            if not self._allowance.take(asyncio.get_running_loop().time()):
                self._remark(told)
        elif isinstance(told, Present):
            raise BadMessage("`present` may only be in the first message")
        elif answer is not None and not answer.done():  # else it came too late
            answer.set_result(told)


class Conversations:
    def __init__(self, jobs: Jobs, gate: Gate, limits: ServiceLimits) -> None:
        self._jobs, self._gate = jobs, gate
        what = "streams for questions"
        self._streams = Counts(what, limits.streams_per_identity, limits.agents, option="--max-agents")

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {"Converse": grpc.stream_stream_rpc_method_handler(calls.guard(self._converse))}

    async def _converse(self, _: Any, context: Any) -> None:
        identity = self._gate.identify(context)
        identity.require(Right.JOIN)
        with count_open(self._streams, identity):
            present = await self._read_first(context)
            if present is not None:
                await self._stay(self._job_of(present, identity), present.agent, context)

    async def _read_first(self, context: Any) -> Present | None:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            data = await context.read()
        if data is grpc.aio.EOF:
            return None
        _, present = read_answer(data)
        if not isinstance(present, Present):
            raise BadMessage("the first message of this stream must have `present`")
        return present

    def _job_of(self, present: Present, identity: Identity) -> Job:
        identity.require(Right.JOIN, present.job_id)
        job = self._jobs.if_open(present.job_id)
        if job is None or present.agent not in job.streams:
            raise NotFound(f"agent {present.agent} has not joined job {present.job_id!r} at this replica")
        return job

    async def _stay(self, job: Job, agent: AgentId, context: Any) -> None:
        conversation = Conversation(agent, context, lambda remark: job.remark(remark, agent.node))
        before = job.conversations.get(agent)
        if before is not None:
            before.end()
        job.conversations[agent] = conversation
        try:
            await conversation.run()
        except BadMessage as error:
            raise StreamAborted(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        finally:
            if job.conversations.get(agent) is conversation:
                del job.conversations[agent]


async def ask(job: Job, agent: AgentId, wanted: Wanted, wait_s: float) -> Told:
    """Ask one agent of the job."""
    conversation = job.conversations.get(agent)
    if conversation is not None:
        return await conversation.ask(wanted, wait_s)
    release = job.state.spec.version if job.state.spec is not None else ""
    if agent not in job.streams:
        return CannotAnswer("the agent is not connected to this service now")
    return CannotAnswer(
        f"the agent has not opened its stream for questions: it has just connected, or its release ({release}) does "
        "not answer questions. Try again; if that does not help, install the release of the service on this node"
    )
