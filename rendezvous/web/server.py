"""Serves the page with uvicorn, in the event loop of the process that has the jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from rendezvous.access.auth import Identity, Reason
from rendezvous.access.secret import file_problem
from rendezvous.service.listener import Listener, listen_at
from rendezvous.web.application import Application
from rendezvous.web.feed import Feeds, Recorder
from rendezvous.web.logins import Logins

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.access.auth import Certificates, Gate, Grant
    from rendezvous.control.service import Caller

_LAST_ANSWERS_S = 2


@dataclass(frozen=True, slots=True)
class Behind:
    """What the page shows. `only`: the job, if there is just one."""

    gate: Gate
    caller_of: Callable[[Identity, str], Caller]
    refused: Callable[[Reason, str, str], None]
    only: str = ""
    grant: Grant | None = None  # without tokens: what the user of the page may do; None: everything


class Page:
    def __init__(self, behind: Behind, certificates: Certificates | None = None) -> None:
        self._behind, self._certificates = behind, certificates
        self._logins = Logins(behind.gate, behind.grant)
        reader = behind.caller_of(Identity("the page"), "")
        self.recorder = Recorder(reader, self._renew_certificate, only=behind.only)
        self._feeds = Feeds(reader, self.recorder)
        self._stamp = _stamp(certificates)
        self._config: uvicorn.Config | None = None
        self._server: uvicorn.Server | None = None
        self._app: Application | None = None
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the URL, with the token of the only login if there is one. Raises `OSError`."""
        listening = await asyncio.to_thread(listen_at, host, port)
        bound = listening[0].getsockname()[1]
        certificates, scheme = self._certificates, "http" if self._certificates is None else "https"
        app = self._app = Application(
            self._logins,
            self._feeds,
            self._behind.caller_of,
            self._behind.refused,
            self._admit,
            cookie=f"ddp_session_{bound}",
            is_secure=certificates is not None,
            only=self._behind.only,
        )
        self._config = config = _config(app, certificates)
        config.load()
        server = self._server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # the process has handlers of its own
        self._task = asyncio.get_running_loop().create_task(server.serve([]), name="page")

        def protocol() -> asyncio.BaseProtocol:
            found: asyncio.BaseProtocol = config.http_protocol_class(
                config=config, server_state=server.server_state, app_state={}
            )
            return found

        self._listener = Listener(protocol, self._note_crowd, config.ssl)
        self._listener.start(listening)
        self.recorder.start()
        shown = f"[{host}]" if ":" in host else host
        once = f"#login={self._logins.once}" if self._logins.once else ""
        self.url = f"{scheme}://{shown}:{bound}/"
        return self.url + once

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        await self.recorder.close()
        if self._app is not None:
            self._app.close()
        await self._feeds.close()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task])

    def _admit(self, address: str, port: int, name: str) -> bool:
        return self._listener is not None and self._listener.admit(address, port, name)

    def _note_crowd(self, address: str) -> None:
        self._behind.refused(Reason.CROWD, address, "too many open connections to the page without a login")

    def _renew_certificate(self) -> None:
        """Use a certificate that was replaced for new connections. A pair that does not match is not used yet."""
        stamp, certificates = _stamp(self._certificates), self._certificates
        if certificates is None or self._config is None or not stamp or stamp == self._stamp:
            return
        with contextlib.suppress(OSError):
            if not file_problem(certificates.certificate, certificates.key, certificates.client_ca):
                self._config.ssl.load_cert_chain(certificates.certificate, certificates.key)
                self._stamp = stamp


def _config(app: Application, certificates: Certificates | None) -> uvicorn.Config:
    secure: dict[str, Any] = {}
    if certificates is not None:
        secure = {"ssl_certfile": certificates.certificate, "ssl_keyfile": certificates.key}
        if certificates.client_ca:
            secure |= {"ssl_ca_certs": certificates.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return uvicorn.Config(
        app.asgi(),
        lifespan="off",
        ws="none",
        http="h11",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        **secure,
    )


def _stamp(certificates: Certificates | None) -> tuple[int, ...]:
    if certificates is None:
        return ()
    try:
        found = [os.stat(path) for path in (certificates.certificate, certificates.key)]
    except OSError:
        return ()
    return tuple(value for each in found for value in (each.st_mtime_ns, each.st_ino, each.st_size))
