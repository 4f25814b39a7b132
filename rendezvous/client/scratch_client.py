"""Calls of an agent outside its session: the key-value store of a job ("scratchpad"), and the clock of the service."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.client.channel import Route, metadata, open_channel
from rendezvous.grpc_io import reason_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.contracts import TIME_METADATA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.client.credential_files import ClientOptions

_SCRATCHPAD = "/rendezvous.v1.Scratchpad/"
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_CALL_S = 5.0
_PAUSE_S = 0.2
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,  # the job, or the value of another node, is not written yet
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class CallFailed(Exception):
    """A call failed. The message says why."""


class Scratch:
    """The values of one job. Raises `CallFailed` if a call does not succeed within its timeout."""

    def __init__(self, endpoints: Sequence[str], options: ClientOptions, job_id: str) -> None:
        self._endpoints, self._options, self._job_id = list(endpoints), options, job_id
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def put(self, key: str, value: bytes, within_s: float) -> None:
        await self._call("PutValue", pb.PutValueRequest(job_id=self._job_id, key=key, value=value), within_s)

    async def get(self, key: str, within_s: float) -> bytes:
        """Wait until the value exists, and return it."""
        request = pb.GetValueRequest(job_id=self._job_id, key=key, wait_s=_CALL_S / 2)
        answer = await self._call("GetValue", request, within_s)
        return bytes(answer.value)

    async def _call(self, method: str, request: Any, within_s: float) -> Any:
        """Try one endpoint after another, and follow redirects."""
        loop = asyncio.get_running_loop()
        give_up_at, route = loop.time() + within_s, Route(self._endpoints)
        while True:
            try:
                return await self._ask(route.endpoint, method, request)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AGAIN or loop.time() > give_up_at:
                    raise CallFailed(f"{error.code().name.lower()}: {reason_of(error)}") from error
                route.refused(error)
            await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.5))

    async def _ask(self, endpoint: str, method: str, request: Any) -> Any:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._options)
        call: Any = self._channels[endpoint].unary_unary(_SCRATCHPAD + method)
        data = await call(request.SerializeToString(), metadata=metadata(self._options), timeout=_CALL_S)
        return getattr(pb, f"{method}Response").FromString(data)


async def clock_offset(endpoint: str, options: ClientOptions, asks: int = 4) -> tuple[float, float] | None:
    """Return the offset of the service's clock and its error bound, or None if the service does not answer.

    The fastest of several calls counts. The service reads its clock between our request and its answer. So its time
    differs from the middle of the call by at most half the round-trip time.
    """
    best: tuple[float, float] | None = None
    async with open_channel(endpoint, options) as channel:
        for _ in range(asks):
            check: Any = channel.unary_unary(_HEALTH_CHECK)
            call = check(b"", timeout=_CALL_S)
            began = time.time()
            since = time.monotonic()
            try:
                received = await call.initial_metadata()
            except grpc.aio.AioRpcError:
                return best
            half_s = (time.monotonic() - since) / 2
            await call.code()
            theirs = next((str(value) for key, value in received if key == TIME_METADATA), "")
            if theirs and (best is None or half_s < best[1]):
                best = (float(theirs) - (began + half_s), half_s)
    return best
