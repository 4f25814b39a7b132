"""What every call passes through: the gate, the limits, and one table from our errors to gRPC's."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rendezvous.access.auth import Denied, peer_name
from rendezvous.access.refusals import Reason
from rendezvous.codec import BadMessage
from rendezvous.service.agent_stream import Cut
from rendezvous.service.jobs import Elsewhere
from rendezvous.service.limits import LimitReached
from rendezvous.store.protocol import Conflict, Deposed, StoreError
from rendezvous.store.protocol import LimitReached as ValuesFull
from rendezvous.values.wire_names import OWNER_METADATA

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from rendezvous.access.auth import Gate, Identity, Right
    from rendezvous.access.refusals import Refusals
    from rendezvous.metrics import Metrics
    from rendezvous.service.limits import Counts

_log = logging.getLogger("rendezvous")
_CALL_S = 60.0  # the longest that a call without a wait of its own may take


class NotFound(Exception):
    """In words."""


class NotNow(Exception):
    """As the job stands, the order means nothing. In words."""


@contextmanager
def held(counts: Counts, identity: Identity) -> Iterator[None]:
    counts.enter(identity.name)
    try:
        yield
    finally:
        counts.leave(identity.name)


class Calls:
    def __init__(self, gate: Gate, metrics: Metrics, refusals: Refusals, counts: Counts) -> None:
        self._gate, self._metrics, self._refusals, self._counts = gate, metrics, refusals, counts

    def unary(
        self, right: Right, request_type: Any, answer: Callable[[Any, Identity], Awaitable[Any]]
    ) -> Any:
        """`answer` may look at `request.job_id`, where there is one: it is covered by the caller's right."""
        by_job = "job_id" in request_type.DESCRIPTOR.fields_by_name

        async def call(data: bytes, context: Any) -> bytes:
            identity = self._gate.identify(context)
            identity.require(right)
            request = request_type.FromString(data)
            if by_job:
                identity.require(right, request.job_id)
            wait_s = min(getattr(request, "wait_s", 0.0), 3600.0)
            with held(self._counts, identity):
                async with asyncio.timeout(_CALL_S + max(0.0, wait_s)):
                    response: bytes = (await answer(request, identity)).SerializeToString()
                    return response

        return grpc.unary_unary_rpc_method_handler(self.guarded(call))

    def guarded(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def guarded_call(request: Any, context: Any) -> Any:
            code, words, owner = grpc.StatusCode.OK, "", ""
            try:
                return await call(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                code, words, owner = _status(error)
                self._note(error, re.sub("^ipv[46]:", "", peer_name(context)))
            finally:
                self._metrics.count("calls", code.name.lower())
            trailing = ((OWNER_METADATA, owner),) if owner else ()
            await context.abort(code, words, trailing)

        return guarded_call

    def _note(self, error: Exception, peer: str) -> None:
        if isinstance(error, Denied):
            self._refusals.note(error.reason, peer, error.words)
        if (
            isinstance(error, Cut) and error.code is not grpc.StatusCode.ABORTED
        ):  # by the agent's own next stream
            self._refusals.note(Reason.CUT_OFF, peer, f"the stream of {error.whose} was cut: {error.words}")


def _status(error: Exception) -> tuple[grpc.StatusCode, str, str]:
    code = grpc.StatusCode
    match error:
        case Denied() | Cut():
            return error.code, error.words, ""
        case Elsewhere():
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
            return code.FAILED_PRECONDITION, "the key is at another version", ""
        case TimeoutError():
            return code.DEADLINE_EXCEEDED, "it took too long", ""
        case Deposed() | StoreError() | ConnectionError():
            return code.UNAVAILABLE, str(error), ""
        case _:
            _log.error("a call failed", exc_info=error)
            return code.INTERNAL, "the service made a mistake; its log says which", ""
