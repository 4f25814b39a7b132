"""The session of an agent with a remote service. It adds gRPC streams, timers and jitter to `session_rules`.

One task carries out the actions that the rules return, one after the other: keep a stream open, or wait. Messages from
the stream and from the agent, and the end of a stream, are passed to the rules as events.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from rendezvous.client.channel import Route, metadata, open_channel, probe_tls
from rendezvous.client.credential_files import ClientOptions, OptionsUnusable
from rendezvous.client.session_rules import (
    CloseRequested,
    ContactChanged,
    Deliver,
    MessageSent,
    OpenStream,
    Pause,
    PauseEnded,
    ReceivedMessage,
    SessionEvent,
    SessionState,
    StreamEnded,
    StreamFailed,
    StreamState,
    Write,
    heartbeat_every_s,
    step,
)
from rendezvous.codec import (
    HEARTBEAT,
    PROGRESS,
    BadMessage,
    answer_message,
    from_agent_bytes,
    read_question,
    read_to_agent,
)
from rendezvous.grpc_io import reason_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.contracts import (
    NOT_ALLOWED,
    TIME_METADATA,
    UNUSABLE,
    VERSION,
    version_in,
    with_releases,
)
from rendezvous.values.events import AgentHeard, AgentJoined, FromAgent, Refused, ToAgent
from rendezvous.values.questions import (
    Answerer,
    CannotAnswer,
    FromConversation,
    Present,
    Remark,
    RestartTimes,
)
from rendezvous.values.types import AgentId

# --- the session -----------------------------------------------------------------------------------

ATTEND = "/rendezvous.v1.Agents/Attend"

_CLOSE_S = 1.0
_CANCEL_AGAIN_S = 0.05
_PROBED_EVERY_S = 1.0
_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED: NOT_ALLOWED,
    grpc.StatusCode.PERMISSION_DENIED: NOT_ALLOWED,
    grpc.StatusCode.INVALID_ARGUMENT: UNUSABLE,
    grpc.StatusCode.UNIMPLEMENTED: UNUSABLE,
}


# Numbers all streams of this process: the service rejects a number that an agent has used before.
_NUMBERS = itertools.count(1)


class RemoteSession:
    def __init__(self, endpoints: tuple[str, ...], agent: AgentId, options: ClientOptions) -> None:
        self._agent, self._options = agent, options
        self._outbox: deque[bytes] = deque()
        self._inbox: asyncio.Queue[ToAgent | BaseException] = asyncio.Queue()
        self._news: asyncio.Future[None] | None = None
        # By endpoint: when it was probed, and what was found.
        self._probes: dict[str, tuple[float, str]] = {}
        self._on_contact: Callable[[bool], None] = _ignore
        self._has_progress: Callable[[], bool] = bool  # False
        self._answerer: Answerer | None = None
        self._remarks = Remarks()
        self._job_id = ""  # of the last join
        self._loop = asyncio.get_running_loop()
        first = random.randrange(len(endpoints))
        self._state = SessionState(endpoints, options.give_up_s, self._loop.time(), at=first)
        self._work: asyncio.Queue[OpenStream | Pause | None] = asyncio.Queue()
        self._task = self._loop.create_task(self._run(), name="rendezvous session")
        self._task.add_done_callback(self._ended)

    # --- for the agent ------------------------------------------------------------------------

    def send(self, message: FromAgent) -> None:
        if isinstance(message, AgentJoined):
            self._job_id = message.spec.job_id
        self._take(MessageSent(message))

    async def receive(self) -> ToAgent:
        message = await self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def watch_contact(self, callback: Callable[[bool], None]) -> None:
        self._on_contact = callback

    def ask_for_progress(self, has_progress: Callable[[], bool]) -> None:
        self._has_progress = has_progress

    def answer_with(self, answer: Answerer) -> None:
        self._answerer = answer

    def tell(self, remark: Remark | RestartTimes) -> None:
        self._remarks.put(remark)

    async def close(self) -> None:
        """End the session. Queued messages are delivered if that takes no longer than a second."""
        self._take(CloseRequested())
        self._wake()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        await _end(self._task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)

    # --- one event after another ---------------------------------------------------------------------

    def _take(self, event: SessionEvent) -> None:
        self._state, effects = step(self._state, event, self._loop.time())
        for effect in effects:
            match effect:
                case Write(messages):
                    self._write_soon(messages)
                case Deliver(message):
                    self._inbox.put_nowait(message)
                case ContactChanged(held):
                    self._on_contact(held)
                case OpenStream(_, messages):
                    self._outbox.clear()  # now, so that later messages come after these
                    self._write_soon(messages)
                    self._work.put_nowait(effect)
                case Pause():
                    self._work.put_nowait(effect)
        if self._state.link is StreamState.OVER:
            self._work.put_nowait(None)

    def _write_soon(self, messages: Iterable[FromAgent]) -> None:
        for message in messages:
            self._outbox.append(HEARTBEAT if isinstance(message, AgentHeard) else from_agent_bytes(message))
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _run(self) -> None:
        while (work := await self._work.get()) is not None:
            if isinstance(work, Pause):
                await asyncio.sleep(random.uniform(work.least_s, work.most_s))
                self._take(PauseEnded())
            else:
                self._take(await self._use_stream(work))

    # --- one stream ----------------------------------------------------------------------------------

    async def _use_stream(self, stream: OpenStream) -> SessionEvent:
        try:
            channel = open_channel(
                stream.endpoint, self._options, stream.patience_s, stream.ping_after_s, stream.connect_s
            )
        except OptionsUnusable as error:
            return StreamFailed(str(error), refused=Refused(str(error), UNUSABLE), may_recover=True)
        number = ("rendezvous-stream", str(next(_NUMBERS)))
        call: Any = channel.stream_stream(ATTEND)(metadata=(*metadata(self._options), number))
        writer = self._loop.create_task(self._write(call))
        beside = self._loop.create_task(self._answer(channel, stream.questions_after_s))
        try:
            await self._read(call, stream.first_answer_s)
        except grpc.aio.AioRpcError as error:
            failed = _classified(error, renewable=bool(self._options.token_file))
        except TimeoutError:
            failed = StreamFailed("no answer", silent=True)
        except BadMessage as error:
            words = (
                f"cannot read a message of the service at {stream.endpoint}: {error}. "
                "Install the same version of ddp-launch on all nodes and on the service"
            )
            failed = StreamFailed(words, refused=Refused(words, UNUSABLE))
        else:
            return StreamEnded()
        finally:
            await _end(writer, beside)
            call.cancel()
            await channel.close()
        return await self._probed(failed, stream.endpoint)

    async def _answer(self, channel: grpc.aio.Channel, after_s: float) -> None:
        if self._answerer is not None:
            joined = Present(self._agent, self._job_id)
            await converse(channel, metadata(self._options), joined, self._answerer, self._remarks, after_s)

    async def _probed(self, failed: StreamFailed, endpoint: str) -> StreamFailed:
        """Add the result of the TLS probe if no service was reached yet.

        Later, a TLS failure may be temporary, because certificates are being replaced.
        """
        if self._state.was_reached or self._state.is_closing or failed.refused is not None:
            return failed
        probed_at, found = self._probes.get(endpoint, (-_PROBED_EVERY_S, ""))
        if self._loop.time() - probed_at >= _PROBED_EVERY_S:
            found = await probe_tls(endpoint, self._options)
            self._probes[endpoint] = self._loop.time(), found
        return StreamFailed(failed.reason, failed.silent, tls_problem=found)

    async def _read(self, call: Any, first_answer_s: float) -> None:
        async with asyncio.timeout(first_answer_s):
            data = await call.read()
        while data is not grpc.aio.EOF:
            self._take(ReceivedMessage(read_to_agent(data)))
            data = await call.read()
        if await call.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await call.code(),
                await call.initial_metadata(),
                await call.trailing_metadata(),
                await call.details(),
            )

    async def _write(self, call: Any) -> None:
        every_s = heartbeat_every_s(self._state)
        try:
            while True:
                while self._outbox:
                    await call.write(self._outbox.popleft())
                if self._state.is_closing:
                    await call.done_writing()
                    return
                await self._news_or(every_s)
                if not self._outbox and not self._state.is_closing:
                    await call.write(PROGRESS if self._has_progress() else HEARTBEAT)
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the stream is over; the reader gets the reason

    async def _news_or(self, timeout_s: float) -> None:
        news = self._news = self._loop.create_future()
        alarm = self._loop.call_later(timeout_s, self._wake)
        try:
            await news
        finally:
            self._news = None
            alarm.cancel()


def _ignore(_held: bool) -> None:
    pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel until they have ended: gRPC swallows a cancellation that comes before the service has answered a call."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


def _classified(error: grpc.aio.AioRpcError, *, renewable: bool) -> StreamFailed:
    """Classify a failed stream. An expired token may still be renewed in its file; until then the job continues."""
    code, words = error.code(), reason_of(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:  # gRPC's own answer, which has no version of the service
        words = with_releases(
            "the service does not support this call", version_in(error.trailing_metadata()), VERSION
        )
    if code in _FINAL:
        refused = Refused(f"the rendezvous rejected this agent: {words}", _FINAL[code])
        may_recover = renewable and code is grpc.StatusCode.UNAUTHENTICATED
        return StreamFailed(f"unauthenticated: {words}", refused=refused, may_recover=may_recover)
    silent = "ping timeout" in words or "keepalive" in words  # gRPC has no code for it
    return StreamFailed(f"{code.name.lower().replace('_', ' ')}: {words}", silent=silent)


# --- conversing -------------------------------------------------------------------------------------
#
# The agent's side of the stream of questions, beside a stream of its session and over the same connection.
#
# It ends with that stream: the caller cancels it. A service of an older release does not know the call; then the agent
# tries again only with its next stream. A failure here never ends the session.

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


# --- the scratchpad, and the clock -----------------------------------------------------------------
#
# Calls of an agent outside its session: the key-value store of a job ("scratchpad"), and the clock of the service.

_SCRATCHPAD = "/rendezvous.v1.Scratchpad/"
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_CALL_S = 5.0
_SCRATCH_PAUSE_S = 0.2
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,  # the job, or the value of another node, is not written yet
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class CallFailed(Exception):
    """A call failed. The message says why."""


class Scratch:
    """The values of one job. Raises `CallFailed` if a call does not succeed within its timeout."""

    def __init__(self, endpoints: Sequence[str], options: ClientOptions, job_id: str) -> None:
        self._endpoints, self._options, self._job_id = list(endpoints), options, job_id
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def put(self, key: str, value: bytes, within_s: float) -> None:
        await self._call("PutValue", pb.PutValueRequest(job_id=self._job_id, key=key, value=value), within_s)

    async def get(self, key: str, within_s: float) -> bytes:
        """Wait until the value exists, and return it."""
        request = pb.GetValueRequest(job_id=self._job_id, key=key, wait_s=_CALL_S / 2)
        answer = await self._call("GetValue", request, within_s)
        return bytes(answer.value)

    async def _call(self, method: str, request: Any, within_s: float) -> Any:
        """Try one endpoint after another, and follow redirects."""
        loop = asyncio.get_running_loop()
        give_up_at, route = loop.time() + within_s, Route(self._endpoints)
        while True:
            try:
                return await self._ask(route.endpoint, method, request)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AGAIN or loop.time() > give_up_at:
                    raise CallFailed(f"{error.code().name.lower()}: {reason_of(error)}") from error
                route.refused(error)
            await asyncio.sleep(_SCRATCH_PAUSE_S * random.uniform(0.5, 1.5))

    async def _ask(self, endpoint: str, method: str, request: Any) -> Any:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._options)
        call: Any = self._channels[endpoint].unary_unary(_SCRATCHPAD + method)
        data = await call(request.SerializeToString(), metadata=metadata(self._options), timeout=_CALL_S)
        return getattr(pb, f"{method}Response").FromString(data)


async def clock_offset(endpoint: str, options: ClientOptions, asks: int = 4) -> tuple[float, float] | None:
    """Return the offset of the service's clock and its error bound, or None if the service does not answer.

    The fastest of several calls counts. The service reads its clock between our request and its answer. So its time
    differs from the middle of the call by at most half the round-trip time.
    """
    best: tuple[float, float] | None = None
    async with open_channel(endpoint, options) as channel:
        for _ in range(asks):
            check: Any = channel.unary_unary(_HEALTH_CHECK)
            call = check(b"", timeout=_CALL_S)
            began = time.time()
            since = time.monotonic()
            try:
                received = await call.initial_metadata()
            except grpc.aio.AioRpcError:
                return best
            half_s = (time.monotonic() - since) / 2
            await call.code()
            theirs = next((str(value) for key, value in received if key == TIME_METADATA), "")
            if theirs and (best is None or half_s < best[1]):
                best = (float(theirs) - (began + half_s), half_s)
    return best
