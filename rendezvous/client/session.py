"""What an agent sees of the rendezvous: one ordered conversation, wherever the service runs.

Light to import: an agent on a single machine never loads gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rendezvous.client.options import ClientOptions
    from rendezvous.values.events import FromAgent, ToAgent
    from rendezvous.values.types import AgentId


class Session(Protocol):
    def send(self, message: FromAgent) -> None:
        """Never blocks; messages arrive in the order they were sent."""

    async def receive(self) -> ToAgent: ...

    def watch_contact(self, tell: Callable[[bool], None]) -> None:
        """`tell` hears whenever the service goes out of reach (False) and is heard again (True)."""

    async def close(self) -> None: ...


def connect(endpoints: Sequence[str], agent: AgentId, options: ClientOptions) -> Session:
    """Within a running event loop. Goes on trying; the session itself tells when there is no use in it."""
    from rendezvous.grpc_io import choose_engine

    choose_engine()
    from rendezvous.client.remote_session import RemoteSession

    return RemoteSession(tuple(endpoints), agent, options)
