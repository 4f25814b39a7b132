"""/livez, /readyz and /metrics over plain HTTP, without a web framework.

Each connection serves one request. The answer says `Connection: close`; further requests on the same connection are not
answered, which HTTP/1.1 permits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rendezvous.service.listener import Listener, Places, listen_at

if TYPE_CHECKING:
    from rendezvous.access.auth import Reason

_REQUEST_S = 5.0
_REQUEST_BYTES = 8192
_PLACES = Places(strangers=64)  # a normal probe has its answer before it loses its place
_HTTP2 = b"PRI * HTTP/2.0"  # the first bytes of every gRPC client
_HINT = "this port (--http) serves HTTP only: send gRPC calls to the address of --listen\n"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_NOT_ALLOWED = "405 Method Not Allowed"


class Web:
    """The HTTP server. If `alive` returns false, /livez fails, although the event loop still answers.

    `warning`: lines that /readyz adds to its answer.
    """

    def __init__(
        self,
        ready: Callable[[], bool],
        metrics: Callable[[], str],
        alive: Callable[[], bool] = lambda: True,
        refused: Callable[[Reason, str, str], None] | None = None,
        warning: Callable[[], str] = str,
    ) -> None:
        self._warning = warning
        self._ready, self._metrics, self._alive, self._refused = ready, metrics, alive, refused
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Listener(self._protocol, self._note_crowd, places=_PLACES)

    async def listen(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises `OSError`."""
        listening = await asyncio.to_thread(listen_at, host, port)
        self._listener.start(listening)
        return int(listening[0].getsockname()[1])

    async def close(self) -> None:
        await self._listener.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _protocol(self) -> asyncio.BaseProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_REQUEST_BYTES), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None, "internal error: called outside of a task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = await reader.readuntil(b"\r\n\r\n")
                if request.startswith(_HTTP2):
                    peer = str(writer.get_extra_info("peername", ("",))[0])
                    if self._refused is not None:
                        from rendezvous.access.auth import Reason

                        self._refused(
                            Reason.HTTP_PORT,
                            peer,
                            "the client sent gRPC to the port of --http; use the port of --listen",
                        )
                writer.write(self._answer(request))
                writer.write_eof()
                # Read the rest, such as a body: closing a socket with unread bytes would discard the answer.
                while await reader.read(_REQUEST_BYTES):
                    pass
        except TimeoutError:
            writer.transport.abort()  # also if the client does not read its answer
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a request that is too long or does not end gets no answer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _note_crowd(self, address: str) -> None:
        if self._refused is not None:
            from rendezvous.access.auth import Reason

            self._refused(Reason.CROWD, address, "too many open connections to the port of --http")

    def _answer(self, request: bytes) -> bytes:
        head, body = _response(*self._decide(request))
        return head if request.startswith(b"HEAD ") else head + body

    def _decide(self, request: bytes) -> tuple[str, str, str]:
        """Status, body and its type."""
        if request.startswith(_HTTP2):
            return _NOT_ALLOWED, _HINT, _TEXT
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return "400 Bad Request", "the request line is not METHOD PATH HTTP/1.1\n", _TEXT
        if words[0] not in (b"GET", b"HEAD"):
            return _NOT_ALLOWED, "use GET or HEAD\n", _TEXT
        return self._resource(words[1].split(b"?")[0])

    def _resource(self, path: bytes) -> tuple[str, str, str]:
        match path:
            case b"/livez" if self._alive():
                return "200 OK", "alive\n", _TEXT
            case b"/livez":
                return (
                    "503 Service Unavailable",
                    "not alive: the service makes no progress; restart it\n",
                    _TEXT,
                )
            case b"/readyz" if self._ready():
                return "200 OK", f"ready\n{self._warning()}", _TEXT
            case b"/readyz":
                return "503 Service Unavailable", "not ready\n", _TEXT
            case b"/metrics":
                return "200 OK", self._metrics(), _METRICS
            case _:
                return "404 Not Found", "use /livez, /readyz or /metrics\n", _TEXT


def _response(status: str, text: str, content_type: str) -> tuple[bytes, bytes]:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    if status == _NOT_ALLOWED:
        head += "Allow: GET, HEAD\r\n"
    return head.encode() + b"Connection: close\r\n\r\n", body
