"""grpc.health.v1.Health, without generated code: a request contains a service name, the answer a status number.

So it cannot conflict with another copy of that schema in the same process.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from rendezvous.values.wire_names import TIME_METADATA

if TYPE_CHECKING:
    from rendezvous.service.calls import Calls

SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"
_UNKNOWN_SERVICE = b"\x08\x03"
LIVE = "live"  # for liveness probes: a service that is temporarily unable to serve must not be killed for it
_WATCHES = 64


class Health:
    """Health answers. They need no token, since probes send none. They contain only the status of the service."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = ("", *services)
        self._serving = False
        self._changed = asyncio.Event()
        self._watches = 0

    @property
    def serving(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> None:
        self._serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    def answer(self, service: str) -> bytes:
        if service == LIVE:
            return SERVING
        if service not in self._services:
            return _UNKNOWN_SERVICE
        return SERVING if self._serving else NOT_SERVING

    async def _check(self, data: bytes, context: Any) -> bytes:
        status = self.answer(_service(data))
        if status == _UNKNOWN_SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service name")
        await context.send_initial_metadata(((TIME_METADATA, f"{time.time():.6f}"),))
        return status

    async def _watch(self, data: bytes, context: Any) -> None:
        if self._watches >= _WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_WATCHES} health watches are open, which is the limit: close some, or use Check",
            )
        service, sent = _service(data), b""
        self._watches += 1
        try:
            while True:
                changed = self._changed
                if (status := self.answer(service)) != sent:
                    sent = status
                    await context.write(status)
                await changed.wait()
        finally:
            self._watches -= 1


def _service(data: bytes) -> str:
    """Decode field 1, a short string: tag, length, text."""
    if len(data) < 2 or data[0] != 0x0A or data[1] != len(data) - 2:
        return "" if not data else "?"
    return data[2:].decode("utf-8", "replace")
