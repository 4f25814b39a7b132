"""The calls of the page, answered in this process.

They pass the same checks, limits and handlers as the calls of ddpctl over gRPC, and fail with the same errors. So the
code of ddpctl that asks agents and collects stories serves the page as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.calls import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rendezvous.access.auth import Identity
    from rendezvous.service.calls import Calls
    from rendezvous.service.operations import Operations


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
