"""Calls of ddpctl to the service: to the replica that owns the job, whichever endpoint answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

import _ddp_launch_entry as doors
from rendezvous import local
from rendezvous.client.channel import Route, metadata, open_channel
from rendezvous.client.credential_files import ClientOptions, OptionsUnusable
from rendezvous.codec import question_message, told_in
from rendezvous.control.formats import warn
from rendezvous.grpc_io import reason_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.settings import SettingsUnusable, check_address
from rendezvous.values.contracts import PORT
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.questions import FromConversation, Wanted

OPERATIONS = "/rendezvous.v1.Operations/"
_HISTORY_DIR = "DDP_LAUNCH_HISTORY_DIR"  # of --history-dir of the launcher
_ROUNDS = 3
_PAUSE_S = 0.25
_FOLLOWED_S = 60.0  # for which `watch` keeps trying while no replica has the job


class Service:
    """`finds_local`: also the jobs of this user on this machine, which have no service.

    `log_dir`: also the finished jobs whose logs are there.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        options: ClientOptions,
        timeout_s: float,
        *,
        finds_local: bool = False,
        log_dir: str = "",
    ) -> None:
        self.endpoints, self.options, self._timeout_s = tuple(endpoints), options, timeout_s
        self._finds_local, self._log_dir = finds_local, log_dir
        self._finished: list[Any] | None = None
        self._files: dict[str, Caller] = {}  # jobs whose calls are answered from files
        self._awake: set[str] = set()

    async def _endpoints_of(self, job_id: str) -> tuple[str, ...]:
        here = local.endpoint_of(job_id) if self._finds_local and job_id else ""
        return (here,) if here and await self._wake(here) else self.endpoints

    async def _wake(self, endpoint: str) -> bool:
        if endpoint in self._awake or await local.wake(endpoint):
            self._awake.add(endpoint)
            return True
        return False

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        return open_channel(endpoint, ClientOptions() if endpoint.startswith("unix:") else self.options)

    def finished(self) -> list[Any]:
        """The finished jobs that no service keeps, the last one first. Raises `WingMissing`."""
        if not self._finds_local and not self._log_dir:
            return []
        if self._finished is None:
            wing = doors.find(doors.HISTORY, "files")
            folder = os.environ.get(_HISTORY_DIR, "") if self._finds_local else "none"
            self._finished = list(wing.finished_jobs(folder, self._log_dir))
        return self._finished

    def _is_in_files(self, job_id: str, error: grpc.aio.AioRpcError) -> bool:
        """Whether a job that no service knows is one of them."""
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND) or not job_id:
            return False
        with contextlib.suppress(doors.WingMissing):
            found = next((job for job in self.finished() if job.job_id == job_id), None)
            if found is not None:
                from rendezvous.local_calls import caller_of

                self._files[job_id] = caller_of(found)
        return job_id in self._files

    async def call(self, method: str, request: Any, *, longer_s: float = 0.0) -> Any:
        """Call the service, or a file if the job is known to nobody else. Raises `AioRpcError`."""
        job_id = getattr(request, "job_id", "")
        if job_id not in self._files:
            try:
                return await self._call(method, request, longer_s)
            except grpc.aio.AioRpcError as error:
                if not self._is_in_files(job_id, error):
                    raise
        return await self._files[job_id].call(method, request, longer_s=longer_s)

    async def _call(self, method: str, request: Any, longer_s: float) -> Any:
        """Try one endpoint after another, and follow redirects. Raises the last `AioRpcError`.

        `longer_s`: how long the service may wait by itself, in addition to the timeout of the call.
        """
        endpoints = await self._endpoints_of(getattr(request, "job_id", ""))
        route, left = Route(endpoints), 2 * _ROUNDS * len(endpoints)  # half of them for redirects
        while True:
            try:
                return await self.ask(route.endpoint, method, request, longer_s)
            except grpc.aio.AioRpcError as error:
                route.refused(error)
                left -= 1 if route.owner else 2
                if error.code() is not grpc.StatusCode.UNAVAILABLE or left <= 0:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def ask(self, endpoint: str, method: str, request: Any, longer_s: float = 0.0) -> Any:
        async with self._open(endpoint) as channel:
            call: Any = channel.unary_unary(OPERATIONS + method)
            data = request.SerializeToString()
            answer = await call(data, metadata=metadata(self.options), timeout=self._timeout_s + longer_s)
            return getattr(pb, f"{method}Response").FromString(answer)

    async def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]:
        if job_id not in self._files:
            told = False
            try:
                async for note in self._notes(job_id, follow=follow):
                    told = True
                    yield note
                return
            except grpc.aio.AioRpcError as error:
                if told or not self._is_in_files(job_id, error):
                    raise
        async for note in self._files[job_id].notes(job_id, follow=follow):
            yield note

    async def _notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]:
        """Yield each event of a job exactly once, even if the stream breaks or another replica takes over."""
        latest, failed_since, found = pb.WatchEventsResponse(), 0.0, False
        route = Route(await self._endpoints_of(job_id))
        loop = asyncio.get_running_loop()
        while True:
            request = pb.WatchEventsRequest(
                job_id=job_id, after_seq=latest.note.seq, journal_id=latest.journal_id, follow=follow
            )
            try:
                async for response in self._watch(route.endpoint, request):
                    latest, failed_since, found = response, 0.0, True
                    yield response.note
                return
            except grpc.aio.AioRpcError as error:
                route.refused(error)
                failed_since, found = failed_since or loop.time(), found or bool(route.owner)
                retry_s = _FOLLOWED_S if follow and found else _ROUNDS * _PAUSE_S
                if error.code() is not grpc.StatusCode.UNAVAILABLE or loop.time() - failed_since > retry_s:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _watch(self, endpoint: str, request: Any) -> AsyncIterator[Any]:
        async with self._open(endpoint) as channel:
            call: Any = channel.unary_stream(OPERATIONS + "WatchEvents")
            async for data in call(request.SerializeToString(), metadata=metadata(self.options)):
                yield pb.WatchEventsResponse.FromString(data)

    async def all_jobs(self, *, may_be_none: bool = False) -> list[Any]:
        """All jobs, also those that have ended: each replica lists those that it owns, and then come those in files.

        `may_be_none`: if the user has named no service, none need be there.
        """
        jobs: dict[str, Any] = {}
        last: grpc.aio.AioRpcError | None = None
        reached, unreachable = 0, list[str]()
        here = local.endpoints() if self._finds_local else []
        for endpoint in [*[each for each in here if await self._wake(each)], *self.endpoints]:
            try:
                answer = await self.ask(endpoint, "ListJobs", pb.ListJobsRequest())
            except grpc.aio.AioRpcError as error:
                last = error
                unreachable.append(f"{endpoint} ({reason_of(error)})")
                continue
            reached += 1
            jobs |= {job.job_id: job for job in answer.jobs}
        finished = await self._finished_summaries()
        may_be_none = (may_be_none and self._finds_local) or bool(finished)
        is_expected = may_be_none and last is not None and last.code() is grpc.StatusCode.UNAVAILABLE
        if last is not None and not reached and not is_expected:
            raise last
        if unreachable and not self._finds_local:  # else a service is not expected
            warn(f"the list may be incomplete: no answer from {', '.join(unreachable)}")
        return [
            *(jobs[job_id] for job_id in sorted(jobs)),
            *(each for each in finished if each.job_id not in jobs),
        ]

    async def _finished_summaries(self) -> list[Any]:
        try:
            finished = self.finished()
        except doors.WingMissing:
            return []
        if not finished:
            return []
        from rendezvous.local_calls import caller_of

        return [summary for job in finished for summary in await caller_of(job).all_jobs()]


def endpoints(text: str) -> list[str]:
    """The endpoints in `text`. Raises `OptionsUnusable`."""
    words = (word.strip() for word in text.split(","))
    found = [word if ":" in word.rpartition("]")[2] else f"{word}:{PORT}" for word in words if word]
    try:
        for endpoint in found:
            check_address(endpoint)
    except SettingsUnusable as error:
        raise OptionsUnusable(f"--rendezvous: {error}") from None
    if not found:
        raise OptionsUnusable("--rendezvous is empty: give at least one HOST:PORT")
    return found


# --- asking -----------------------------------------------------------------------------------------
#
# Questions of ddpctl to the agents of a job, and the job they are about if the user names none.

_NODES_AT_ONCE = 64  # if the answers of all nodes do not fit into one message


class Caller(Protocol):
    """Calls the service: over gRPC (`Service`), or in its own process."""

    async def call(self, method: str, request: Any, *, longer_s: float = 0.0) -> Any:
        """Raises `grpc.aio.AioRpcError`."""

    def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]: ...

    async def all_jobs(self) -> list[Any]: ...


class NoSuchJob(Coded):
    """The job cannot be determined. The message is for the user."""

    code = Code.NO_SUCH_JOB


class BadArgument(Coded):
    """An argument cannot be used, such as a file that cannot be read. The message is for the user."""

    code = Code.FILE_UNREADABLE


async def inquire(
    service: Caller,
    job_id: str,
    wanted: Wanted,
    *,
    nodes: Sequence[str] = (),
    ranks: Sequence[int] = (),
    wait_s: float = 5.0,
) -> list[tuple[str, FromConversation]]:
    """The answers by node, in the order of node ranks."""
    question = question_message(0, wanted)

    async def ask(named: Sequence[str]) -> Any:
        request = pb.AskRequest(job_id=job_id, nodes=named, ranks=ranks, question=question, wait_s=wait_s)
        return await service.call("Ask", request, longer_s=wait_s)

    response = await ask(nodes)
    answers = {each.node: told_in(each.answer) for each in response.answers}
    if response.left_out:
        job = (await service.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
        left = [n.node for n in job.nodes if n.HasField("node_rank") and n.node not in answers]
        for first in range(0, len(left), _NODES_AT_ONCE):
            response = await ask(left[first : first + _NODES_AT_ONCE])
            answers |= {each.node: told_in(each.answer) for each in response.answers}
    return list(answers.items())


async def job_named(service: Caller, given: str, *, ended_too: bool = False) -> str:
    """`given`, or the only job that has not ended; with `ended_too`, else the last that did. Raises `NoSuchJob`."""
    if given:
        return given
    jobs = await service.all_jobs()
    running = [job.job_id for job in jobs if job.phase != pb.PHASE_ENDED]
    if len(running) == 1:
        return str(running[0])
    if running:
        raise NoSuchJob(f"{len(running)} jobs run ({', '.join(running[:8])}): name one")
    if ended_too and jobs:
        last = max(job.ended_at for job in jobs)
        found = [job.job_id for job in jobs if job.ended_at == last]
        if len(found) == 1:
            return str(found[0])
        raise NoSuchJob(f"{len(found)} jobs have ended ({', '.join(found[:8])}): name one")
    ended = (
        f" ({len(jobs)} ha{'s' if len(jobs) == 1 else 've'} ended: `ddpctl list --all` shows them)"
        if jobs
        else ""
    )
    raise NoSuchJob(f"no job runs{ended}")
