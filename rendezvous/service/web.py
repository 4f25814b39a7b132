"""/livez, /readyz and /metrics over plain HTTP: three answers, and nothing that a web framework would add."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.access.refusals import Reason

_REQUEST_S = 5.0
_REQUEST_BYTES = 8192
_AT_ONCE = 64
_HTTP2 = b"PRI * HTTP/2.0"  # how every gRPC client begins
_HINT = "this port tells of health in HTTP; gRPC is served at the address of --listen\n"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Web:
    """`alive`: it answers, and that is not all there is to being alive."""

    def __init__(
        self,
        ready: Callable[[], bool],
        metrics: Callable[[], str],
        alive: Callable[[], bool] = lambda: True,
        refused: Callable[[Reason, str, str], None] | None = None,
    ) -> None:
        self._ready, self._metrics, self._alive, self._refused = ready, metrics, alive, refused
        self._asking: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port; raises `OSError`."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._make_room()
        self._asking[writer] = None
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = await reader.readuntil(b"\r\n\r\n")
                if request.startswith(_HTTP2):
                    self._note_grpc(str(writer.get_extra_info("peername", ("",))[0]))
                writer.write(self._answer(request))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked like this gets no answer
        finally:
            self._asking.pop(writer, None)
            writer.close()

    def _make_room(self) -> None:
        """Of many at once, those who never finish their question go: a probe says it in one breath, and is answered."""
        if len(self._asking) >= _AT_ONCE:
            oldest = next(iter(self._asking))
            del self._asking[oldest]
            oldest.transport.abort()

    def _note_grpc(self, peer: str) -> None:
        if self._refused is not None:
            from rendezvous.access.refusals import Reason

            self._refused(Reason.HTTP_PORT, peer, "it speaks gRPC to the port of --http")

    def _answer(self, request: bytes) -> bytes:
        if request.startswith(_HTTP2):
            return _response("405 Method Not Allowed", _TEXT, _HINT)
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", _TEXT, "only GET\n")
        match words[1].split(b"?")[0]:
            case b"/livez" if self._alive():
                return _response("200 OK", _TEXT, "alive\n")
            case b"/livez":
                return _response("503 Service Unavailable", _TEXT, "stands still\n")
            case b"/readyz" if self._ready():
                return _response("200 OK", _TEXT, "ready\n")
            case b"/readyz":
                return _response("503 Service Unavailable", _TEXT, "not ready\n")
            case b"/metrics":
                return _response("200 OK", _METRICS, self._metrics())
            case _:
                return _response("404 Not Found", _TEXT, "there are /livez, /readyz and /metrics\n")


def _response(status: str, content_type: str, text: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
