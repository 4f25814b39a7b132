"""The page of one job, in the process of an agent.

If the rendezvous of the job runs in this process, the page calls it directly. Otherwise its calls go to the service,
with the credentials of the agent. A token that may not control jobs gives a page that only shows the job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from rendezvous.control.service import Caller
from rendezvous.grpc_io import choose_engine, silence_grpc

choose_engine()
silence_grpc()

from ddp_launch_wings.web.server import Behind, Page  # noqa: E402
from rendezvous.access.auth import BadToken, Gate, Grant, Identity, Refusals, granted_by  # noqa: E402
from rendezvous.client.credential_files import ClientOptions, current_token  # noqa: E402
from rendezvous.control.service import Service  # noqa: E402
from rendezvous.local_calls import InProcess, calls_of  # noqa: E402
from rendezvous.metrics import Metrics  # noqa: E402

if TYPE_CHECKING:
    from rendezvous.embedded import EmbeddedRendezvous

_LOOPBACK = "127.0.0.1"
_CALL_S = 10.0


async def serve(
    job_id: str, job: EmbeddedRendezvous | None, endpoints: Sequence[str], options: ClientOptions
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """The URL, with the token of its only login, and a function that ends the page. Raises `OSError`."""
    grant = None
    if job is not None:
        operations, calls = calls_of(job)

        def caller_of(identity: Identity, peer: str) -> Caller:
            return InProcess(operations, calls, identity, peer)
    else:
        service = Service(endpoints, options, _CALL_S)
        grant = _grant_of(options)

        def caller_of(identity: Identity, peer: str) -> Caller:
            return service

    behind = Behind(Gate(""), caller_of, Refusals(Metrics()).note, job_id, grant)
    page = Page(behind)
    return await page.start(_LOOPBACK, 0), page.close


def _grant_of(options: ClientOptions) -> Grant | None:
    """What the token of the agent permits, as it says itself: the service decides."""
    token = current_token(options)
    try:
        return granted_by(token) if token else None
    except BadToken:
        return None
