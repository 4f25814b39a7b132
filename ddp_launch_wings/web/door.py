"""What the house uses of the page. Imports its packages only when they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_launch_wings.web.server import Page
    from rendezvous.access.auth import Certificates
    from rendezvous.client.credential_files import ClientOptions
    from rendezvous.embedded import EmbeddedRendezvous
    from rendezvous.local_calls import InProcess

_PACKAGES = ("starlette", "uvicorn")


def missing_packages(what: str = "--web") -> str:
    """What to do, for the user of `what`; empty if nothing is missing."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    return f"{what} needs {' and '.join(missing)}, which are not installed: pip install 'ddp-launch[web]'"


def of_service(server: Any, certificates: Certificates | None) -> Page:
    """The page of all jobs of a service. It has `start(host, port)` and `close()`."""
    from ddp_launch_wings.web.server import Behind, Page
    from rendezvous.local_calls import InProcess

    def caller_of(identity: Any, peer: str) -> InProcess:
        return InProcess(server.operations, server.calls, identity, peer)

    return Page(Behind(server.gate, caller_of, server.refusals.note), certificates)


async def of_job(
    job_id: str, job: EmbeddedRendezvous | None, endpoints: Sequence[str], options: ClientOptions
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """The URL of the page of one job, and a function that ends the page. Raises `OSError`."""
    found = await asyncio.to_thread(import_module, "ddp_launch_wings.web.job_page")
    served: tuple[str, Callable[[], Awaitable[None]]] = await found.serve(job_id, job, endpoints, options)
    return served
