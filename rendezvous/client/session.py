"""The session of an agent with the rendezvous: messages in order. The same for an embedded and a remote service.

Light to import: an agent on a single machine never loads gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rendezvous.client.credential_files import ClientOptions
    from rendezvous.values.events import FromAgent, ToAgent
    from rendezvous.values.questions import Answerer, Remark, RestartTimes
    from rendezvous.values.types import AgentId


class Session(Protocol):
    def send(self, message: FromAgent) -> None:
        """Queue a message. Never blocks; messages arrive in the order in which they were sent."""

    async def receive(self) -> ToAgent: ...

    def watch_contact(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` with False when the service becomes unreachable, and with True when it answers again."""

    def ask_for_progress(self, has_progress: Callable[[], bool]) -> None:
        """Call this with each heartbeat: have the ranks finished a collective with other nodes since the last one?"""

    def answer_with(self, answer: Answerer) -> None:
        """Answer the questions of the service with this. It must not raise."""

    def tell(self, remark: Remark | RestartTimes) -> None:
        """Send what no question asked for, when there is a stream for it. The oldest ones may be dropped."""

    async def close(self) -> None: ...


def connect(endpoints: Sequence[str], agent: AgentId, options: ClientOptions) -> Session:
    """Open a session in a running event loop. It keeps trying; `receive` reports when a retry cannot help."""
    from rendezvous.grpc_io import choose_engine

    choose_engine()
    from rendezvous.client.remote_session import RemoteSession

    return RemoteSession(tuple(endpoints), agent, options)
