"""One job in the service: its owner task, the streams of its agents, and its event journal."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc

from rendezvous.codec import to_agent_bytes
from rendezvous.rounds.outcome_truncation import fitted
from rendezvous.service.agent_stream import AgentStream, StreamAborted
from rendezvous.service.coalescer import Coalescer
from rendezvous.service.open_job import OpenJob
from rendezvous.service.owner import JobOwner
from rendezvous.session_replay import Redirect
from rendezvous.values.events import AgentLost, Assigned, Notice, Refused, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.metrics import Metrics
    from rendezvous.replay.journal import Journal
    from rendezvous.service.conversation import Conversation
    from rendezvous.store.protocol import JobStore
    from rendezvous.values.events import Event, ToAgent
    from rendezvous.values.state import JobState
    from rendezvous.values.types import AgentId

_STREAM_NUMBERS_KEPT = 65_536
_UNCONFIRMED_S = 0.2


class Job(OpenJob):
    """One open job. `holds` returns whether this replica owns the job now. `journal` is for `ddpctl replay`."""

    def __init__(
        self,
        job_id: str,
        store: JobStore,
        holds: Callable[[str], bool],
        metrics: Metrics,
        resume_grace_s: float,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(job_id, lambda kind: metrics.count("events", kind))
        self.streams: dict[AgentId, AgentStream] = {}
        self.conversations: dict[AgentId, Conversation] = {}
        self._stream_numbers: dict[AgentId, int] = {}  # the highest number that the agent has used
        self.idle_since = time.monotonic()
        self._holds, self._metrics, self._resume_grace_s = holds, metrics, resume_grace_s
        self._journal = journal
        self._absent: dict[AgentId, asyncio.TimerHandle] = {}
        self._last: tuple[ToAgent, bytes] | None = None
        self._coalescer: Coalescer[AgentStream, Waiting] = Coalescer(
            lambda to, message: to.put(self._encoded(message))
        )
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.owner = JobOwner(store, self._send, note=self.note, record=journal)
        self.task = asyncio.get_running_loop().create_task(self.owner.run(), name=f"job {job_id}")

    def owner_task(self) -> asyncio.Task[None]:
        return self.task

    async def wait_loaded(self) -> None:
        """Wait until the state is read. Raises the store's error if it cannot be read."""
        await asyncio.wait([self.task, self._loaded], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task

    @property
    def is_idle(self) -> bool:
        return not self.streams and not self.watchers and not self._orders

    # --- streams -----------------------------------------------------------------------------------

    def is_new_stream(self, agent: AgentId, number: int) -> bool:
        """Whether the number of the stream is new to this replica.

        Another replica may admit a replayed join. The next stream of the real agent ends such a stream.
        """
        if number <= self._stream_numbers.get(agent, 0):
            return number == 0 and agent not in self._stream_numbers
        self._stream_numbers[agent] = number
        if len(self._stream_numbers) > _STREAM_NUMBERS_KEPT:
            del self._stream_numbers[next(iter(self._stream_numbers))]
        return True

    def attach(self, stream: AgentStream) -> None:
        agent = stream.agent
        before = self.streams.get(agent)
        if before is not None:
            before.abort(StreamAborted(grpc.StatusCode.ABORTED, "the agent opened another stream"))
        self.streams[agent] = stream
        if (timer := self._absent.pop(agent, None)) is not None:
            timer.cancel()

    def detach(self, stream: AgentStream) -> None:
        agent = stream.agent
        if self.streams.get(agent) is not stream:
            return
        del self.streams[agent]
        if (conversation := self.conversations.get(agent)) is not None:
            conversation.end()
        self._coalescer.drop(stream)
        self.idle_since = time.monotonic()
        member = self.state.members.get(agent.node)
        if stream.has_left or self.task.done() or member is None or member.agent != agent:
            return
        if stream.was_redirected:
            return  # by this replica. A crowd cannot come back within the grace, so the lease decides.
        self._await_stream(agent)

    def _await_stream(self, agent: AgentId) -> None:
        self._absent[agent] = asyncio.get_running_loop().call_later(self._grace_s(), self._give_up, agent)

    def _grace_s(self) -> float:
        spec = self.state.spec
        return self._resume_grace_s if spec is None else min(self._resume_grace_s, spec.lease_s)

    def _give_up(self, agent: AgentId) -> None:
        if self.owner.has_progress(agent):
            self._await_stream(agent)
            return
        del self._absent[agent]
        words = f"its stream broke and it did not reconnect within {self._grace_s():g} s"
        self.owner.post(AgentLost(agent, words))

    def _send(self, agent: AgentId, message: ToAgent) -> None:
        stream = self.streams.get(agent)
        if stream is None:
            return
        if not self._holds(self.job_id):
            stream.redirect(
                Redirect("", _UNCONFIRMED_S, "this replica cannot confirm that it owns the job; trying again")
            )
            return
        if isinstance(message, Waiting):
            self._coalescer.put(stream, message)
        else:
            self._coalescer.drop(stream)
            stream.put(self._encoded(message))

    def notify(self, text: str) -> None:
        """Print `text` on all nodes that have joined."""
        for agent in list(self.streams):
            self._send(agent, Notice(self.state.generation, text))

    def _encoded(self, message: ToAgent) -> bytes:
        """Encode a broadcast only once. Assignments differ from node to node and are not kept."""
        if isinstance(message, Assigned):
            return to_agent_bytes(message)
        if self._last is None or self._last[0] != message:
            if isinstance(message, Refused):
                self._metrics.count("turned_away", "temporary" if message.retryable else "final")
            short = fitted(message, lambda m: len(to_agent_bytes(m)))
            self._last = (message, to_agent_bytes(short))
        return self._last[1]

    def note(self, event: Event | None, before: JobState, after: JobState) -> None:
        if event is None:
            self._last = None
            if not self._loaded.done():
                self._loaded.set_result(None)
        super().note(event, before, after)

    # --- the end -----------------------------------------------------------------------------------

    async def close(self, redirect: Redirect) -> None:
        """Give up the job, and redirect its agents."""
        for stream in list(self.streams.values()):
            stream.redirect(redirect)
        for conversation in list(self.conversations.values()):
            conversation.end()
        for watcher in self.watchers:
            watcher.job_moved = True
            watcher.put(None)
        for timer in self._absent.values():
            timer.cancel()
        self._absent.clear()
        self._coalescer.close()
        self.task.cancel()
        await asyncio.wait([self.task])
        if self._journal is not None:
            self._journal.end()
