"""The wrapper of every call: access checks, limits, and one table from our errors to gRPC status codes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rendezvous.access.auth import Denied, Gate, Identity, Reason, Refusals, Right, peer_name
from rendezvous.codec import BadMessage
from rendezvous.service.agent_stream import Counts, LimitReached, Rates, ServiceLimits, StreamAborted
from rendezvous.service.owner import OwnedByOther
from rendezvous.store.protocol import Conflict, OwnershipLost, StoreError, ValuesFull
from rendezvous.values.contracts import OWNER_METADATA, VERSION, VERSION_METADATA, version_in, with_releases

if TYPE_CHECKING:
    from rendezvous.metrics import Metrics

_log = logging.getLogger("rendezvous")
_CALL_S = 60.0  # timeout of a call, besides the wait that it asks for


class NotFound(Exception):
    """The job or the value does not exist. The message is for the caller."""


class NotNow(Exception):
    """The order does not apply in the current phase of the job. The message is for the caller."""


@contextmanager
def count_open(counts: Counts, identity: Identity) -> Iterator[None]:
    """Count one more for this identity while the block runs. Raises `LimitReached`."""
    counts.enter(identity.name)
    try:
        yield
    finally:
        counts.leave(identity.name)


class Calls:
    """`arrived` gets the context of each call, before anything else."""

    def __init__(
        self,
        gate: Gate,
        metrics: Metrics,
        refusals: Refusals,
        limits: ServiceLimits,
        arrived: Callable[[Any], None] = lambda _context: None,
    ) -> None:
        self._gate, self._metrics, self._refusals = gate, metrics, refusals
        self.arrived = arrived
        self._counts = Counts("calls", limits.calls_per_identity)
        self._rates = Rates(limits.calls_per_s, limits.call_burst)

    def unary(
        self, right: Right, request_type: Any, answer: Callable[[Any, Identity], Awaitable[Any]]
    ) -> Any:
        """Build the handler of a unary call."""

        async def call(data: bytes, context: Any) -> bytes:
            identity = self._gate.identify(context)
            identity.require(right)
            request = request_type.FromString(data)
            response: bytes = (await self.perform(right, request, identity, answer)).SerializeToString()
            return response

        return grpc.unary_unary_rpc_method_handler(self.guard(call))

    async def perform(
        self,
        right: Right,
        request: Any,
        identity: Identity,
        answer: Callable[[Any, Identity], Awaitable[Any]],
    ) -> Any:
        """Answer one request, if the caller has the right to it: for `request.job_id`, if that field exists."""
        by_job = "job_id" in request.DESCRIPTOR.fields_by_name
        identity.require(right, request.job_id if by_job else None)
        wait_s = min(getattr(request, "wait_s", 0.0), 3600.0)
        with count_open(self._counts, identity):
            turn_s = self._rates.take(identity.name, asyncio.get_running_loop().time())
            if turn_s > 0.0:
                await asyncio.sleep(turn_s)
            async with asyncio.timeout(_CALL_S + max(0.0, wait_s)):
                return await answer(request, identity)

    def guard(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Wrap `call`: its errors become gRPC status codes, and a counter has each code."""

        async def guarded_call(request: Any, context: Any) -> Any:
            code, words, owner = grpc.StatusCode.OK, "", ""
            self.arrived(context)
            try:
                return await call(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                code, words, owner = status_of(error)
                if code is grpc.StatusCode.INVALID_ARGUMENT:
                    words = with_releases(words, VERSION, version_in(context.invocation_metadata()))
                self.note(error, re.sub("^ipv[46]:", "", peer_name(context)))
            finally:
                self._metrics.count("calls", code.name.lower())
            trailing = ((VERSION_METADATA, VERSION), *(((OWNER_METADATA, owner),) if owner else ()))
            await context.abort(code, words, trailing)

        return guarded_call

    def note(self, error: Exception, peer: str) -> None:
        """Count and log a refusal."""
        if isinstance(error, Denied):
            self._refusals.note(error.reason, peer, error.words)
        # ABORTED: the same agent opened another stream.
        if isinstance(error, StreamAborted) and error.code is not grpc.StatusCode.ABORTED:
            self._refusals.note(
                Reason.STREAM_ABORTED, peer, f"ended the stream of {error.whose}: {error.words}"
            )


def status_of(error: Exception) -> tuple[grpc.StatusCode, str, str]:
    """Status, message, and the address of the owner if another replica owns the job."""
    code = grpc.StatusCode
    match error:
        case Denied() | StreamAborted():
            return error.code, error.words, ""
        case OwnedByOther():
            return code.UNAVAILABLE, str(error), error.address
        case LimitReached() | ValuesFull():
            return code.RESOURCE_EXHAUSTED, str(error), ""
        case BadMessage() | DecodeError() | UnicodeDecodeError():
            return code.INVALID_ARGUMENT, str(error), ""
        case NotNow():
            return code.FAILED_PRECONDITION, str(error), ""
        case NotFound():
            return code.NOT_FOUND, str(error), ""
        case Conflict():
            return (
                code.FAILED_PRECONDITION,
                "the value was changed in the meantime; read it again and retry",
                "",
            )
        case TimeoutError():
            return (
                code.DEADLINE_EXCEEDED,
                "the call did not finish within its timeout; retry, or see the log of the service",
                "",
            )
        case OwnershipLost() | StoreError() | ConnectionError():
            return code.UNAVAILABLE, str(error), ""
        case _:
            _log.error("internal error in a call; see the traceback", exc_info=error)
            return code.INTERNAL, "internal error of the service; see its log", ""
