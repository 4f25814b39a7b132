"""The calls for tools, served in an agent's process for the one job in it. Imports gRPC: only when a tool asks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rendezvous.grpc_io import choose_engine, silence_grpc

choose_engine()
silence_grpc()

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

from rendezvous.access.auth import Gate, Refusals  # noqa: E402
from rendezvous.metrics import Metrics  # noqa: E402
from rendezvous.service.agent_stream import MESSAGE_BYTES, ServiceLimits  # noqa: E402
from rendezvous.service.calls import Calls  # noqa: E402
from rendezvous.service.jobs import summaries_of  # noqa: E402
from rendezvous.service.operations import Operations  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rendezvous.embedded import EmbeddedRendezvous

_OPERATIONS = "rendezvous.v1.Operations"
_STOP_S = 0.5


class _OneJob:
    """As `Jobs` of the service, as far as tools need it."""

    def __init__(self, job: EmbeddedRendezvous) -> None:
        self._job = job

    async def find(self, job_id: str) -> Any:
        has_begun = self._job.state.spec is not None
        return self._job if job_id == self._job.job_id and has_begun else None

    async def listed(self) -> tuple[list[Any], dict[str, str]]:
        return list(summaries_of([self._job]).values()), {}


def calls_of(job: EmbeddedRendezvous) -> tuple[Operations, Calls]:
    limits, metrics, gate = ServiceLimits(), Metrics(), Gate("")
    calls = Calls(gate, metrics, Refusals(metrics), limits)
    return Operations(_OneJob(job), gate, limits), calls  # type: ignore[arg-type]


async def serve(job: EmbeddedRendezvous, address: str) -> Callable[[], Awaitable[None]]:
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
