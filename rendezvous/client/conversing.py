"""The agent's side of the stream of questions, beside a stream of its session and over the same connection.

It ends with that stream: the caller cancels it. A service of an older release does not know the call; then the agent
tries again only with its next stream. A failure here never ends the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.codec import BadMessage, answer_message, read_question
from rendezvous.values.questions import CannotAnswer
from rendezvous.values.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from rendezvous.client.session import Answerer
    from rendezvous.values.questions import FromConversation, Present, Remark, RestartTimes

CONVERSE = "/rendezvous.v1.Agents/Converse"
_PAUSE_S = 0.1  # after a stream with questions
_LONGEST_PAUSE_S = 10.0
_MOST_REMARKS = 16
_LONGEST = 1_000_000  # the service accepts 1 MiB
_NEVER = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class Remarks:
    """What waits to be sent without a question."""

    def __init__(self) -> None:
        self._waiting: deque[Remark | RestartTimes] = deque(maxlen=_MOST_REMARKS)
        self._news = asyncio.Event()

    def put(self, remark: Remark | RestartTimes) -> None:
        self._waiting.append(remark)
        self._news.set()

    async def send_with(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Until cancelled. A remark is taken once it is written."""
        while True:
            while self._waiting:
                remark = self._waiting[0]
                await write(_bytes(0, remark))
                if self._waiting and self._waiting[0] is remark:
                    self._waiting.popleft()
            self._news.clear()
            await self._news.wait()


async def converse(
    channel: grpc.aio.Channel,
    metadata: Any,
    present: Present,
    answerer: Answerer,
    remarks: Remarks,
    after_s: float,
) -> None:
    """Answer questions and send remarks until cancelled. The first stream is opened after about `after_s`."""
    pause_s = after_s
    while True:
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        talk = _Talk(channel.stream_stream(CONVERSE)(metadata=metadata), answerer)
        try:
            await talk.run(present, remarks)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NEVER:
                return
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            pass
        finally:
            talk.end()
        if talk.was_asked:
            pause_s = _PAUSE_S


class _Talk:
    """One stream. Questions are answered as soon as their answers are known, in any order."""

    def __init__(self, call: Any, answerer: Answerer) -> None:
        self._call, self._answerer = call, answerer
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self.was_asked = False

    async def run(self, present: Present, remarks: Remarks) -> None:
        await self._write(_bytes(0, present))
        self._begin(remarks.send_with(self._write))
        while (data := await self._call.read()) is not grpc.aio.EOF:
            self.was_asked = True
            self._begin(self._answer(data))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._call.write(data)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._call.cancel()

    async def _answer(self, data: bytes) -> None:
        try:
            number, wanted = read_question(data)
        except BadMessage:
            return  # the service gives up waiting; its next question may be readable
        answer = _bytes(number, _UNKNOWN if wanted is None else await self._answerer(wanted))
        if len(answer) > _LONGEST:
            words = f"the answer is too long for one message ({len(answer)} bytes)"
            answer = _bytes(number, CannotAnswer(words))
        await self._write(answer)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the stream is over
        await work


_UNKNOWN = CannotAnswer(
    f"this agent (ddp-launch {VERSION}) does not know the question: install a newer release on its node"
)


def _bytes(number: int, told: FromConversation) -> bytes:
    data: bytes = answer_message(number, told).SerializeToString()
    return data
