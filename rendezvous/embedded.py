"""The rendezvous of a job on one machine, inside its agent's process: no port, no thread, no gRPC.

It uses the same round machine and the same owner as the service, with a store in memory. The agents and the service
stop together, so the leases of these agents never expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rendezvous.service.owner import JobOwner, OpenJob, Record
from rendezvous.store.open import MemoryJobStore
from rendezvous.values.events import AgentJoined, AgentLost, Event, FromAgent, ToAgent
from rendezvous.values.questions import Answerer, CannotAnswer, Remark, RestartTimes, Told, Wanted

if TYPE_CHECKING:
    from rendezvous.client.session import Session
    from rendezvous.values.types import AgentId


class _Conversation:
    """Asks the agent in this process."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer

    async def ask(self, wanted: Wanted, wait_s: float) -> Told:
        try:
            return await asyncio.wait_for(self._answerer(wanted), wait_s)
        except TimeoutError:
            return CannotAnswer(f"the agent did not answer within {wait_s:g} s")


class EmbeddedRendezvous(OpenJob):
    """One job. Connect from within a running event loop; closing the last session ends it."""

    def __init__(self, job_id: str = "", record: Record | None = None) -> None:
        super().__init__(job_id, lambda _kind: None)
        self.owner = JobOwner(MemoryJobStore(), self._send, self._alive, self.note, record)
        self._task: asyncio.Task[None] | None = None
        self.streams: dict[AgentId, _EmbeddedSession] = {}
        self.conversations: dict[AgentId, _Conversation] = {}

    def owner_task(self) -> asyncio.Task[None] | None:
        return self._task

    def connect(self, agent: AgentId) -> Session:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self.owner.run(), name="embedded rendezvous")
            self._task.add_done_callback(self._broken)
        session = _EmbeddedSession(self, agent)
        self.streams[agent] = session
        return session

    def post(self, event: Event) -> None:
        """Post an event, such as an operator's order."""
        self.owner.post(event)

    async def disconnect(self, session: _EmbeddedSession) -> None:
        if self.streams.get(session.agent) is not session:
            return
        del self.streams[session.agent]
        self.conversations.pop(session.agent, None)
        if self.streams:
            self.owner.post(AgentLost(session.agent, "its agent closed the session"))
            return
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _send(self, agent: AgentId, message: ToAgent) -> None:
        session = self.streams.get(agent)
        if session is not None:
            session.inbox.put_nowait(message)

    def _alive(self) -> Iterator[AgentId]:
        return (agent for agent, session in self.streams.items() if session.joined)

    def _broken(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        for session in self.streams.values():
            session.inbox.put_nowait(
                error or ConnectionError("the rendezvous service in this process was stopped")
            )


class _EmbeddedSession:
    def __init__(self, rendezvous: EmbeddedRendezvous, agent: AgentId) -> None:
        self.agent = agent
        self.joined = False
        self.inbox: asyncio.Queue[ToAgent | BaseException] = asyncio.Queue()
        self._rendezvous = rendezvous

    def send(self, message: FromAgent) -> None:
        self.joined = self.joined or isinstance(message, AgentJoined)
        self._rendezvous.post(message)

    async def receive(self) -> ToAgent:
        message = await self.inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def watch_contact(self, callback: Callable[[bool], None]) -> None:
        """Does nothing: the rendezvous in this process is always reachable."""

    def ask_for_progress(self, has_progress: Callable[[], bool]) -> None:
        """Does nothing: an agent in this process has no lease."""

    def answer_with(self, answer: Answerer) -> None:
        self._rendezvous.conversations[self.agent] = _Conversation(answer)

    def tell(self, remark: Remark | RestartTimes) -> None:
        self._rendezvous.remark(remark, self.agent.node)

    async def close(self) -> None:
        await self._rendezvous.disconnect(self)
