"""`--web`: the page of this job, served by its agent. Its packages are loaded beside the start of the job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from launcher.error_boundary import ErrorBoundary
    from launcher.joining.connect import Connection
    from launcher.settings.spec import LaunchSpec


class JobPage:
    def __init__(
        self, spec: LaunchSpec, connection: Connection, say: Callable[[str], None], boundary: ErrorBoundary
    ) -> None:
        self._spec, self._connection, self._say, self._boundary = spec, connection, say, boundary
        self._starting: asyncio.Task[None] | None = None
        self._close: Callable[[], Awaitable[None]] | None = None

    def begin(self) -> None:
        if self._spec.web:
            work = self._boundary.awaited("serving the page", self._serve(), None)
            self._starting = asyncio.get_running_loop().create_task(work, name="start of the page")

    async def _serve(self) -> None:
        service = await asyncio.to_thread(__import__, "rendezvous.job_page", fromlist=["serve"])
        connection = self._connection
        url, self._close = await service.serve(
            self._spec.run_id, connection.job, connection.endpoints, connection.options
        )
        self._say(f"the page of this job, for one login: {url}")

    async def end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._close is not None:
            await self._boundary.awaited("closing the page", self._close(), None)
