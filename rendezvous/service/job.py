"""One job in the service: its owner task, the streams of its agents, and its event journal."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from rendezvous.codec import to_agent_bytes
from rendezvous.rounds.journal import Line, Note, lines
from rendezvous.rounds.outcome_truncation import fitted
from rendezvous.service.agent_stream import AgentStream, StreamAborted
from rendezvous.service.coalescer import Coalescer
from rendezvous.service.owner import JobOwner
from rendezvous.session_replay import Redirect
from rendezvous.values.events import AgentLost, Assigned, Notice, Refused, Waiting
from rendezvous.values.questions import REMARKS, RestartTimes
from rendezvous.values.state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.metrics import Metrics
    from rendezvous.service.conversation import Conversation
    from rendezvous.store.protocol import JobStore
    from rendezvous.values.events import Event, ToAgent
    from rendezvous.values.questions import Remark
    from rendezvous.values.state import JobState
    from rendezvous.values.types import AgentId

_log = logging.getLogger("rendezvous")
_NOTES_KEPT = 1000
_WATCHER_NOTES = 1000
_RESTART_TIMES_KEPT = 4096
_STREAM_NUMBERS_KEPT = 65_536
_UNCONFIRMED_S = 0.2
_CROWD = 64  # with more members than this, log one join in 64: a log line costs as much as a join


class Watcher:
    """A client that follows the journal; the service ends its stream if it falls too far behind."""

    def __init__(self, notes: list[Note]) -> None:
        self.queue: asyncio.Queue[Note | None] = asyncio.Queue(len(notes) + _WATCHER_NOTES)
        for note in notes:
            self.queue.put_nowait(note)
        self.fell_behind = False
        self.job_moved = False  # to another replica, which reports what follows

    def put(self, note: Note | None) -> None:
        try:
            self.queue.put_nowait(note)
        except asyncio.QueueFull:
            self.fell_behind = True


class Job:
    """One open job. `holds` returns whether this replica owns the job now."""

    def __init__(
        self,
        job_id: str,
        store: JobStore,
        holds: Callable[[str], bool],
        metrics: Metrics,
        resume_grace_s: float,
    ) -> None:
        self.job_id = job_id
        self.streams: dict[AgentId, AgentStream] = {}
        self.conversations: dict[AgentId, Conversation] = {}
        self.restart_times: dict[tuple[int, str], RestartTimes] = {}  # by generation and node
        self.watchers: set[Watcher] = set()
        self._stream_numbers: dict[AgentId, int] = {}  # the highest number that the agent has used
        self.notes: deque[Note] = deque(maxlen=_NOTES_KEPT)
        self.journal_id = uuid.uuid4().hex  # sequence numbers are valid within one journal
        self.idle_since = time.monotonic()
        self._holds, self._metrics, self._resume_grace_s = holds, metrics, resume_grace_s
        self._absent: dict[AgentId, asyncio.TimerHandle] = {}
        self._orders: dict[int, tuple[Event, asyncio.Future[None]]] = {}
        self._seq = 0
        self._last: tuple[ToAgent, bytes] | None = None
        self._coalescer: Coalescer[AgentStream, Waiting] = Coalescer(
            lambda to, message: to.put(self._encoded(message))
        )
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.owner = JobOwner(store, self._send, note=self._note)
        self.task = asyncio.get_running_loop().create_task(self.owner.run(), name=f"job {job_id}")

    @property
    def state(self) -> JobState:
        return self.owner.state

    async def wait_loaded(self) -> None:
        """Wait until the state is read. Raises the store's error if it cannot be read."""
        await asyncio.wait([self.task, self._loaded], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task

    async def execute(self, order: Event) -> JobState:
        """Post an order and return the state after it was processed, whether or not it changed anything."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders[id(order)] = (order, done)
        try:
            self.owner.post(order)
            await asyncio.wait([self.task, done], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._orders[id(order)]
        if not done.done():
            raise ConnectionError(
                "this replica stopped serving the job before it processed the order; send the order again"
            )
        return self.state

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
        self._absent[agent] = asyncio.get_running_loop().call_later(self._grace_s(), self._give_up, agent)

    def _grace_s(self) -> float:
        spec = self.state.spec
        return self._resume_grace_s if spec is None else min(self._resume_grace_s, spec.lease_s)

    def _give_up(self, agent: AgentId) -> None:
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

    # --- notes -------------------------------------------------------------------------------------

    def _note(self, event: Event | None, before: JobState, after: JobState) -> None:
        if event is None:
            self._last = None
            if not self._loaded.done():
                self._loaded.set_result(None)
        elif self._orders and (order := self._orders.get(id(event))) is not None and not order[1].done():
            order[1].set_result(None)
        if after is before:
            return
        for line in lines(event, before, after):
            self._add(line, after.generation, _level(line, after))
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            for watcher in self.watchers:
                watcher.put(None)

    def _add(self, line: Line, generation: int, level: int) -> None:
        self._seq += 1
        note = Note(self._seq, time.time(), generation, line.kind, line.node, line.text)
        self.notes.append(note)
        self._metrics.count("events", line.kind)
        extra = {"job": self.job_id, "generation": generation, "kind": line.kind}
        _log.log(level, line.text, extra=extra)
        for watcher in self.watchers:
            watcher.put(note)

    def remark(self, remark: Remark | RestartTimes, node: str = "") -> None:
        """Note what an agent or an operator says, without a change of the state."""
        if isinstance(remark, RestartTimes):
            self.restart_times[remark.generation, node] = replace(remark, node=node)
            while len(self.restart_times) > _RESTART_TIMES_KEPT:
                del self.restart_times[min(self.restart_times)]
            return
        kind = remark.kind if remark.kind in REMARKS else REMARKS[0]
        text = "".join(char if char.isprintable() else " " for char in remark.text)
        self._add(Line(kind, text, node), remark.generation, logging.INFO)

    def watch(self, after_seq: int) -> Watcher:
        watcher = Watcher([note for note in self.notes if note.seq > after_seq])
        self.watchers.add(watcher)
        if self.state.outcome is not None:
            watcher.put(None)
        return watcher

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


def _level(line: Line, after: JobState) -> int:
    """The log level of an event: DEBUG for most joins of a large job. The journal contains all of them."""
    here = len(after.members)
    return logging.DEBUG if line.kind == "joined" and here > _CROWD and here % _CROWD else logging.INFO
