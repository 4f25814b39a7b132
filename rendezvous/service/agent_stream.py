"""One agent's stream, as the service sees it: what comes in is paced, what goes out is bounded.

The call's own task writes; a second one reads. Nobody else touches the stream: the job puts bytes into the
outbox and goes on. An outbox that is full means a client that does not read, and its stream is cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.codec import HEARTBEAT, BadMessage, read_from_agent, to_agent_bytes
from rendezvous.service.limits import Allowance
from rendezvous.values.events import AgentJoined, AgentLeft

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.service.limits import Limits
    from rendezvous.session_replay import Redirect
    from rendezvous.values.events import FromAgent
    from rendezvous.values.types import AgentId

_PACE_EVERY = 64
_RESPITE_S = 0.05


class Cut(Exception):
    """The stream ends badly, with this status."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code, self.words, self.whose = code, words, ""


class Attendance:
    """`alive` hears of every message and `hear` what it says; `busy` tells that the job cannot take more now."""

    def __init__(
        self,
        agent: AgentId,
        context: Any,
        limits: Limits,
        alive: Callable[[AgentId], None],
        hear: Callable[[FromAgent], None],
        busy: Callable[[], bool],
    ) -> None:
        self.agent = agent
        self.has_left = False
        self._context, self._limits, self._busy = context, limits, busy
        self._alive, self._hear = alive, hear
        self._outbox: deque[bytes] = deque()
        self._unread = 0
        self._news: asyncio.Future[None] | None = None
        self._closing = False
        self._begun = False  # something was written
        self._cut: Cut | None = None
        self._task: asyncio.Task[Any] | None = None

    # --- outbound ----------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        if self._closing:
            return
        self._outbox.append(data)
        self._unread += len(data)
        few = len(self._outbox) <= self._limits.outbox_messages
        if few and (self._unread <= self._limits.outbox_bytes or len(self._outbox) == 1):
            self._wake()
        else:
            self.cut(Cut(grpc.StatusCode.RESOURCE_EXHAUSTED, "this client reads too slowly"))

    def redirect(self, redirect: Redirect) -> None:
        """The last word; the stream ends well once it is written."""
        self.put(to_agent_bytes(redirect))
        self.close()

    def close(self) -> None:
        self._closing = True
        self._wake()

    def cut(self, why: Cut) -> None:
        """At once, whatever is unwritten; but the first write must not be interrupted.

        gRPC would not know that the metadata went with it, send them again with the status, and fail to send either.
        """
        if self._cut is None:
            self._cut = why
            self._closing = True
            self._outbox.clear()
            if self._task is not None and self._begun:
                self._task.cancel()
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def run(self) -> None:
        """Until either side ends it; raises `Cut`."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read())
        try:
            while True:
                while self._outbox:
                    data = self._outbox.popleft()
                    await self._context.write(data)
                    self._begun = True
                    self._unread -= len(data)
                if self._closing:
                    break
                self._news = loop.create_future()
                await self._news
        except asyncio.CancelledError:
            if self._cut is None:
                raise
        except grpc.aio.BaseError:
            pass  # nobody is there any more to write to
        finally:
            self._task = None
            reader.cancel()
        if self._cut is not None:
            raise self._cut

    # --- inbound -----------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._read_all()
        except BadMessage as error:
            self.cut(Cut(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        except grpc.aio.BaseError:
            pass  # the stream broke; grpc tells the call's own task, too
        self.close()

    async def _read_all(self) -> None:
        read, agent, alive, n = self._context.read, self.agent, self._alive, 0
        loop = asyncio.get_running_loop()
        allowance = Allowance(self._limits.messages_per_s, self._limits.message_burst, at=loop.time())
        while (data := await read()) is not grpc.aio.EOF:
            alive(agent)
            if data != HEARTBEAT:
                self._hear(self._understood(data))
            n += 1
            if n % _PACE_EVERY == 0:
                await asyncio.sleep(allowance.take(loop.time(), _PACE_EVERY))
            if self._busy():
                await self._respite()

    async def _respite(self) -> None:
        """The job's store is slow. What is not read here waits at its sender."""
        while self._busy():  # noqa: ASYNC110  # a queue of another task: an event per stream would cost more
            await asyncio.sleep(_RESPITE_S)

    def _understood(self, data: bytes) -> FromAgent:
        message = read_from_agent(data, self.agent)
        match message:
            case AgentJoined(agent) if agent != self.agent:
                raise BadMessage(f"this stream is {self.agent}'s; {agent} needs one of its own")
            case AgentLeft():
                self.has_left = True
            case _:
                pass
        return message
