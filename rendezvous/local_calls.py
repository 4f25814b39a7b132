"""The calls for tools, served in an agent's process for the one job in it. Imports gRPC: only when a tool asks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from rendezvous.grpc_io import choose_engine, silence_grpc

choose_engine()
silence_grpc()

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

from rendezvous.access.auth import Gate, Identity, Refusals  # noqa: E402
from rendezvous.metrics import Metrics  # noqa: E402
from rendezvous.pb import rendezvous_pb2 as pb  # noqa: E402
from rendezvous.service.agent_stream import MESSAGE_BYTES, ServiceLimits  # noqa: E402
from rendezvous.service.calls import Calls, status_of  # noqa: E402
from rendezvous.service.jobs import summaries_of  # noqa: E402
from rendezvous.service.operations import Operations  # noqa: E402
from rendezvous.service.owner import OpenJob  # noqa: E402

_OPERATIONS = "rendezvous.v1.Operations"
_STOP_S = 0.5


class _OneJob:
    """As `Jobs` of the service, as far as tools need it."""

    def __init__(self, job: OpenJob) -> None:
        self._job = job

    async def find(self, job_id: str) -> Any:
        has_begun = self._job.state.spec is not None
        return self._job if job_id == self._job.job_id and has_begun else None

    async def listed(self) -> tuple[list[Any], dict[str, str]]:
        return list(summaries_of([self._job]).values()), {}


def calls_of(job: OpenJob) -> tuple[Operations, Calls]:
    limits, metrics, gate = ServiceLimits(), Metrics(), Gate("")
    calls = Calls(gate, metrics, Refusals(metrics), limits)
    return Operations(_OneJob(job), gate, limits), calls  # type: ignore[arg-type]


async def serve(job: OpenJob, address: str) -> Callable[[], Awaitable[None]]:
    operations, calls = calls_of(job)
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MESSAGE_BYTES),))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_OPERATIONS, operations.methods(calls)),)
    )
    before = os.umask(0o177)
    try:
        server.add_insecure_port(address)
    finally:
        os.umask(before)
    await server.start()

    async def stop() -> None:
        await server.stop(_STOP_S)

    return stop


# --- calls without gRPC -----------------------------------------------------------------------------
#
# They pass the same checks, limits and functions as the calls of ddpctl over gRPC, and fail with the same errors. So
# the code of ddpctl that asks agents and collects stories serves the page and the files of finished jobs as well.


def caller_of(job: OpenJob) -> InProcess:
    """Of a job of this user."""
    return InProcess(*calls_of(job), Identity("the user of this machine"))


class InProcess:
    """The calls of one identity. `peer`: its address, for the log of refusals."""

    def __init__(self, operations: Operations, calls: Calls, identity: Identity, peer: str = "") -> None:
        self._operations, self._calls, self._identity, self._peer = operations, calls, identity, peer

    async def call(self, method: str, request: Any, *, longer_s: float = 0.0) -> Any:
        del longer_s  # the handlers limit their time themselves
        right, _, answer = self._operations.unary_calls()[method]
        try:
            return await self._calls.perform(right, request, self._identity, answer)
        except Exception as error:
            raise self._as_of_grpc(error) from error

    async def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]:
        request = pb.WatchEventsRequest(job_id=job_id, follow=follow)
        try:
            async for response in self._operations.events(request, self._identity):
                yield response.note
        except Exception as error:
            raise self._as_of_grpc(error) from error

    async def all_jobs(self) -> list[Any]:
        answer = await self.call("ListJobs", pb.ListJobsRequest())
        return sorted(answer.jobs, key=lambda job: str(job.job_id))

    def _as_of_grpc(self, error: Exception) -> grpc.aio.AioRpcError:
        code, words, _ = status_of(error)
        self._calls.note(error, self._peer)
        empty = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(code, empty, empty, details=words)
