"""One agent's stream on the side of the service: inbound messages are throttled, the outbox is bounded.

Two tasks use the gRPC stream: the task of the call writes, and a second task reads. The job only appends
bytes to the outbox. If the outbox is full, because the client does not read, the service ends the stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import field
from typing import Any

import grpc
import grpc.aio

from rendezvous.codec import HEARTBEAT, PROGRESS, BadMessage, read_from_agent, to_agent_bytes
from rendezvous.session_replay import Redirect
from rendezvous.values.events import AgentJoined, AgentLeft, FromAgent
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import AgentId

_THROTTLE_EVERY = 64  # messages
_BACKLOG_CHECK_S = 0.05


class StreamAborted(Exception):
    """The service ends the stream with this status."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code, self.words, self.whose = code, words, ""


class AgentStream:
    """Calls `alive` for every message, with whether it shows progress, and `handle` with its content.

    Stops reading while `busy` returns true.
    """

    def __init__(
        self,
        agent: AgentId,
        context: Any,
        limits: ServiceLimits,
        alive: Callable[[AgentId, bool], None],
        handle: Callable[[FromAgent], None],
        busy: Callable[[], bool],
    ) -> None:
        self.agent = agent
        self.has_left = self.was_redirected = False
        self._context, self._limits, self._busy = context, limits, busy
        self._alive, self._handle = alive, handle
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._wakeup: asyncio.Future[None] | None = None
        self._closing = False
        self._has_written = False
        self._aborted: StreamAborted | None = None
        self._task: asyncio.Task[Any] | None = None

    # --- outbound ----------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        if self._closing:
            return
        self._outbox.append(data)
        self._outbox_bytes += len(data)
        few = len(self._outbox) <= self._limits.outbox_messages
        if few and (self._outbox_bytes <= self._limits.outbox_bytes or len(self._outbox) == 1):
            self._wake()
        else:
            words = "the outbox is full: this client does not read its messages fast enough; connect again"
            self.abort(StreamAborted(grpc.StatusCode.RESOURCE_EXHAUSTED, words))

    def redirect(self, redirect: Redirect) -> None:
        """Send this as the last message. The stream ends with status OK once it is written."""
        self.was_redirected = True
        self.put(to_agent_bytes(redirect))
        self.close()

    def close(self) -> None:
        self._closing = True
        self._wake()

    def abort(self, why: StreamAborted) -> None:
        """End the stream at once and drop unwritten messages, but do not interrupt the first write.

        The first write also sends the metadata. If it is interrupted, gRPC tries to send the metadata a second time,
        and neither the metadata nor the status arrives.
        """
        if self._aborted is None:
            self._aborted = why
            self._closing = True
            self._outbox.clear()
            if self._task is not None and self._has_written:
                self._task.cancel()
            self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def run(self) -> None:
        """Serve the stream until either side ends it. Raises `StreamAborted`."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read())
        try:
            while True:
                while self._outbox:
                    data = self._outbox.popleft()
                    await self._context.write(data)
                    self._has_written = True
                    self._outbox_bytes -= len(data)
                if self._closing:
                    break
                self._wakeup = loop.create_future()
                await self._wakeup
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
        except grpc.aio.BaseError:
            pass  # the client is gone
        finally:
            self._task = None
            reader.cancel()
        if self._aborted is not None:
            raise self._aborted

    # --- inbound -----------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._read_all()
        except BadMessage as error:
            self.abort(StreamAborted(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        except grpc.aio.BaseError:
            pass  # the stream broke; gRPC reports it to the task of the call, too
        self.close()

    async def _read_all(self) -> None:
        read, agent, alive, n = self._context.read, self.agent, self._alive, 0
        loop = asyncio.get_running_loop()
        allowance = Allowance(self._limits.messages_per_s, self._limits.message_burst, at=loop.time())
        while (data := await read()) is not grpc.aio.EOF:
            alive(agent, data == PROGRESS)
            if data not in (HEARTBEAT, PROGRESS):
                self._handle(self._decode(data))
            n += 1
            if n % _THROTTLE_EVERY == 0:
                await asyncio.sleep(allowance.take(loop.time(), _THROTTLE_EVERY))
            if self._busy():
                # Wait while the store of the job is slow. Flow control keeps unread messages at the sender.
                while self._busy():  # noqa: ASYNC110  # a queue of another task: an event per stream would cost more
                    await asyncio.sleep(_BACKLOG_CHECK_S)

    def _decode(self, data: bytes) -> FromAgent:
        message = read_from_agent(data, self.agent)
        match message:
            case AgentJoined(agent) if agent != self.agent:
                raise BadMessage(f"this stream belongs to {self.agent}; {agent} must open its own stream")
            case AgentLeft():
                self.has_left = True
            case _:
                pass
        return message


# --- limits of the service: per identity, per job, and in total -------------------------------------

MESSAGE_BYTES = 1024 * 1024  # of one inbound message; gRPC rejects longer ones before it stores them


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    jobs: int = 1000  # that are not over
    agents: int = 65_536
    agents_per_job: int = 16_384
    streams_per_identity: int = 16_384
    watches_per_identity: int = 64
    questions_per_identity: int = 64  # to agents, at once: an answer may have 4 MiB
    calls_per_identity: int = 256  # unary, at once
    calls_per_s: float = 500.0  # per identity; calls beyond it wait for their turn ...
    call_burst: int = 20_000  # ... beyond this many: all agents of a large job may share a token
    barriers: int = 65_536  # that have a call waiting in them
    barriers_per_job: int = 1024
    joins_per_s: float = 2000.0  # per identity ...
    join_burst: int = 20_000  # ... beyond this many at once
    outbox_messages: int = 256  # not yet read by one client; then the service ends its stream
    outbox_bytes: int = 2 * 1024 * 1024
    messages_per_s: float = 200.0  # of one stream ...
    message_burst: int = 8192  # ... beyond this many at once: a failed node sends one message per rank
    backlog: int = (
        20_000  # events of one job that wait for its store; then the service stops reading its streams
    )


class LimitReached(Exception):
    """A limit is reached. The message is for the client that reached it."""


@dataclass(slots=True)
class Allowance:
    """A token bucket: `burst` tokens, refilled at `per_s`."""

    per_s: float
    burst: float
    left: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, now: float, count: int = 1) -> float:
        """Take `count` tokens. Returns how long to wait for them; 0 if they were available."""
        self.left = min(self.burst, self.left + (now - self.at) * self.per_s)
        self.at = now
        self.left -= count
        return max(0.0, -self.left / self.per_s)

    def is_full(self, now: float) -> bool:
        return self.left + (now - self.at) * self.per_s >= self.burst


class Counts:
    """How many open streams, watches or calls each identity has. `option` is the option that sets `overall`."""

    def __init__(self, what: str, each: int, overall: int | None = None, *, option: str = "") -> None:
        self._what, self._each, self._overall = what, each, overall
        self._option = option
        self._held: dict[str, int] = {}
        self.total = 0

    def enter(self, identity: str) -> None:
        held = self._held.get(identity, 0)
        if held >= self._each:
            raise LimitReached(
                f"{identity} already has {held} {self._what}, which is a fixed limit: try again after some have ended"
            )
        if self._overall is not None and self.total >= self._overall:
            limit = (
                f"the limit ({self._option})"
                if self._option
                else "a fixed limit: try again after some have ended"
            )
            raise LimitReached(f"the service already has {self.total} {self._what}, which is {limit}")
        self._held[identity] = held + 1
        self.total += 1

    def leave(self, identity: str) -> None:
        held = self._held[identity] - 1
        if held:
            self._held[identity] = held
        else:
            del self._held[identity]
        self.total -= 1


class Rates:
    """An allowance per identity. Allowances that are full again are dropped."""

    _KEPT = 4096

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._known: dict[str, Allowance] = {}

    def take(self, identity: str, now: float) -> float:
        allowance = self._known.get(identity)
        if allowance is None:
            if len(self._known) >= self._KEPT:
                self._known = {i: a for i, a in self._known.items() if not a.is_full(now)}
            allowance = self._known[identity] = Allowance(self._per_s, self._burst, at=now)
        return allowance.take(now)
