"""The session of an agent whose service is elsewhere: it outlives streams, services and addresses.

One task holds one stream after another. A stream begins with what the agent would have to say again
(`Recital`), so whatever was on its way when the last one broke is not missed. Between streams it waits:
hardly at all after a stream that worked, then longer and longer, never in step with the other agents.
It gives up only when trying again cannot help (no right to be there, messages that are not understood), or when no
service was ever reached; that is told as a `Refused`, like any other refusal.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.access.client_options import OptionsUnusable
from rendezvous.access.misfit import misfit
from rendezvous.channel import CONNECT_S, PATIENCE_S, PING_AFTER_S, metadata, open_channel
from rendezvous.codec import HEARTBEAT, BadMessage, from_agent_bytes, read_to_agent
from rendezvous.events import AgentHeard, AgentJoined, Refused, Waiting
from rendezvous.service.conversation import Moved, Recital

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.access.client_options import ClientOptions
    from rendezvous.events import FromAgent, ToAgent
    from rendezvous.types import AgentId

ATTEND = "/rendezvous.v1.Agents/Attend"

_FIRST_ANSWER_S = 8.0
_PAUSE_S = 0.05  # the first pause between streams; they double ...
_LONGEST_PAUSE_S = 5.0  # ... up to this one
_DOUBLINGS_IF_ANSWERED = 3  # a replica is there, and the job's next owner soon will be
_FAREWELL_S = 1.0
_EARLY_WORD_S = 4.0
_MISFIT_S = 20.0  # so long may certificates not fit that are just being put in place
_PROBED_EVERY_S = 1.0
_LATELY_S = 60.0
_RECONNECT_S = 0.6  # a link that was cut may be back a moment after the first packet was lost on it
_SHUNNED_S = 10.0  # a frozen endpoint costs seconds with each try
_LONGEST_PATIENCE_S = 20.0
_CROWD = 400  # agents: more of them ask less often whether the service is alive, and wait longer for the answer ...
_MOST_LEISURE = 5.0  # ... by as many times, up to this: it may well be busy with all the others
_TRY_AGAIN, _NOT_ALLOWED, _MISFIT = 75, 77, 78
_FOR_GOOD = {
    grpc.StatusCode.UNAUTHENTICATED: _NOT_ALLOWED,
    grpc.StatusCode.PERMISSION_DENIED: _NOT_ALLOWED,
    grpc.StatusCode.INVALID_ARGUMENT: _MISFIT,
    grpc.StatusCode.UNIMPLEMENTED: _MISFIT,
}


# Of all streams of this process: the service takes no number of an agent twice.
_NUMBERS = itertools.count(1)


class _Broken(Exception):
    """This stream is over, another may work. In words. `silent`: it was given up, for nothing came any more."""

    def __init__(self, words: str, *, silent: bool) -> None:
        super().__init__(words)
        self.silent = silent


class _Hopeless(Exception):
    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused


class RemoteSession:
    def __init__(self, endpoints: tuple[str, ...], agent: AgentId, options: ClientOptions) -> None:
        self._agent, self._endpoints, self._options = agent, endpoints, options
        self._recital = Recital()
        self._outbox: deque[bytes] = deque()
        self._inbox: asyncio.Queue[ToAgent | BaseException] = asyncio.Queue()
        self._news: asyncio.Future[None] | None = None
        self._closing = False
        self._was_reached = self._told_early = False
        self._worked = False  # this stream did
        self._breaks: list[float] = []  # when streams fell silent before they had said anything
        self._connect_s = CONNECT_S  # for the next try
        self._silent_at: dict[str, float] = {}  # by endpoint
        # By endpoint: when it was looked for, what was found.
        self._misfits: dict[str, tuple[float, str]] = {}
        self._moved: Moved | None = None
        self._tell_contact: Callable[[bool], None] = _nobody_asks
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._task = self._loop.create_task(self._run(), name="rendezvous session")
        self._task.add_done_callback(self._ended)

    # --- what the agent sees ------------------------------------------------------------------------

    def send(self, message: FromAgent) -> None:
        self._recital = self._recital.said(message)
        self._outbox.append(HEARTBEAT if isinstance(message, AgentHeard) else from_agent_bytes(message))
        self._wake()

    async def receive(self) -> ToAgent:
        message = await self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def watch_contact(self, tell: Callable[[bool], None]) -> None:
        self._tell_contact = tell

    async def close(self) -> None:
        """What was said is delivered, if that can be done in a moment."""
        self._closing = True
        self._wake()
        await asyncio.wait([self._task], timeout=_FAREWELL_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)

    # --- one stream after another --------------------------------------------------------------------

    async def _run(self) -> None:
        failures, at = 0, random.randrange(len(self._endpoints))
        words: dict[str, str] = {}
        while not self._recital.lines():
            if self._closing:
                return
            await self._news_or(None)
        while True:
            endpoint = self._sent_to() or self._endpoints[at]
            self._moved, self._worked = None, False
            try:
                await self._converse(endpoint)
            except _Broken as error:
                words[endpoint] = await self._misfit(endpoint) or str(error)
                self._note_silence(endpoint, error)
            except _Hopeless as error:
                self._inbox.put_nowait(error.refused)
                return
            if self._closing:
                return
            if self._worked:
                self._tell_contact(False)
            failures = self._failures(failures)
            if (refused := self._given_up(words)) is not None:
                self._inbox.put_nowait(refused)
                return
            self._say_that_nobody_answers(words)
            if not self._sent_to():
                at = self._next(at, endpoint)
            await asyncio.sleep(self._pause_s(failures))

    def _note_silence(self, endpoint: str, error: _Broken) -> None:
        if not error.silent:
            return
        now = self._silent_at[endpoint] = self._loop.time()
        if self._worked:
            self._connect_s = _RECONNECT_S
        else:
            self._breaks.append(now)

    async def _misfit(self, endpoint: str) -> str:
        """Looked for until a service is reached; later its certificates, or ours, may be on their way."""
        if self._was_reached or self._closing:
            return ""
        looked_at, found = self._misfits.get(endpoint, (-_PROBED_EVERY_S, ""))
        if self._loop.time() - looked_at >= _PROBED_EVERY_S:
            found = await misfit(endpoint, self._options)
            self._misfits[endpoint] = self._loop.time(), found
        return found

    def _given_up(self, words: dict[str, str]) -> Refused | None:
        if self._was_reached:
            return None
        for_s = self._loop.time() - self._started_at
        found = [self._misfits.get(endpoint, (0.0, ""))[1] for endpoint in self._endpoints]
        if all(found) and for_s > min(self._options.give_up_s, _MISFIT_S):
            return Refused("; ".join(dict.fromkeys(found)), _NOT_ALLOWED)
        return Refused(_unreachable(words), _TRY_AGAIN) if for_s > self._options.give_up_s else None

    def _say_that_nobody_answers(self, words: dict[str, str]) -> None:
        """Once, long before it is given up: a wrong address is seen at its first words, if there are any."""
        if self._was_reached or self._told_early or self._loop.time() - self._started_at < _EARLY_WORD_S:
            return
        self._told_early = True
        trying = f"{_unreachable(words)} Trying on for {self._options.give_up_s:g} s"
        self._inbox.put_nowait(Waiting(trying, 0, 1, stands_by=True))

    def _failures(self, before: int) -> int:
        if self._worked:
            return 0
        if self._moved is not None:
            return min(before + 1, _DOUBLINGS_IF_ANSWERED * len(self._endpoints))
        return before + 1

    def _next(self, at: int, left: str) -> int:
        """Rather not where it has just failed, nor where nothing came any more, though others may send us there."""
        n = len(self._endpoints)
        others = [i % n for i in range(at + 1, at + n + 1) if self._endpoints[i % n] != left]
        awake = (i for i in (*others, at) if not self._is_shunned(self._endpoints[i]))
        return next(awake, others[0] if others else at)

    def _is_shunned(self, endpoint: str) -> bool:
        return self._loop.time() - self._silent_at.get(endpoint, -_SHUNNED_S) < _SHUNNED_S

    def _patience_s(self) -> float:
        """Longer with each stream of late that never said anything.

        A service that is merely busy, with thousands of agents joining, must not be made busier by agents that
        leave it and come back. One that has answered is not as busy as that: what falls silent then is most often the
        link, and on one that is cut again and again the node would be lost while we waited.
        """
        since = self._loop.time() - _LATELY_S
        self._breaks = [at for at in self._breaks if at > since]
        return min(_LONGEST_PATIENCE_S, float(self._leisure() * PATIENCE_S * 2 ** len(self._breaks)))

    def _leisure(self) -> float:
        joined = self._recital.joined
        nodes = 0 if joined is None else joined.spec.max_nodes
        return min(max(1.0, nodes / _CROWD), _MOST_LEISURE)

    def _sent_to(self) -> str:
        """Not where nothing came any more: whoever sends us there has yet to notice."""
        if self._moved is None or self._is_shunned(self._moved.address):
            return ""
        return self._moved.address

    def _pause_s(self, failures: int) -> float:
        """All endpoints are tried before the pause grows."""
        if self._moved is not None:
            after_s = self._moved.after_s if self._sent_to() else max(_PAUSE_S, self._moved.after_s)
            return after_s * random.uniform(1.0, 1.5)
        rounds = min(failures // len(self._endpoints), 10)
        return float(random.uniform(0.2, 1.0) * min(_LONGEST_PAUSE_S, _PAUSE_S * 2**rounds))

    async def _converse(self, endpoint: str) -> None:
        try:
            ping_after_s = PING_AFTER_S * self._leisure()
            channel = open_channel(endpoint, self._options, self._patience_s(), ping_after_s, self._connect_s)
        except OptionsUnusable as error:
            raise self._unusable(error) from error
        self._connect_s = CONNECT_S
        number = ("rendezvous-stream", str(next(_NUMBERS)))
        call: Any = channel.stream_stream(ATTEND)(metadata=(*metadata(self._options), number))
        self._outbox.clear()
        self._outbox.extend(from_agent_bytes(line) for line in self._recital.lines())
        writer = self._loop.create_task(self._write(call))
        try:
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            raise self._judged(error) from error
        except TimeoutError as error:
            raise _Broken("no answer", silent=True) from error
        except BadMessage as error:
            raise _Hopeless(Refused(f"the service at {endpoint} says {error}", _MISFIT)) from error
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            call.cancel()
            await channel.close()

    def _unusable(self, error: OptionsUnusable) -> Exception:
        """Certificates that served before are just being replaced: the job need not end for that."""
        if self._was_reached:
            return _Broken(str(error), silent=False)
        return _Hopeless(Refused(str(error), _MISFIT))

    def _judged(self, error: grpc.aio.AioRpcError) -> Exception:
        """A token that ran out may be renewed in its file yet; whoever is in the job goes on until it is."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._was_reached and self._options.token_file:
            return _Broken(f"unauthenticated: {error.details()}", silent=False)
        return _judged(error)

    async def _read(self, call: Any) -> None:
        async with asyncio.timeout(_FIRST_ANSWER_S * self._leisure() + self._patience_s()):
            data = await call.read()
        while data is not grpc.aio.EOF:
            self._take(read_to_agent(data))
            data = await call.read()
        if await call.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await call.code(),
                await call.initial_metadata(),
                await call.trailing_metadata(),
                await call.details(),
            )

    def _take(self, message: ToAgent | Moved) -> None:
        if isinstance(message, Moved):
            self._moved = message
            return
        if not self._worked:
            self._tell_contact(True)
        self._worked = self._was_reached = True
        if again := self._recital.asked_for_by(message):
            self._outbox.extend(from_agent_bytes(report) for report in again)
            self._wake()
        self._recital = self._recital.heard(message)
        self._inbox.put_nowait(message)

    async def _write(self, call: Any) -> None:
        beat_s = self._beat_s()
        try:
            while True:
                while self._outbox:
                    await call.write(self._outbox.popleft())
                if self._closing:
                    await call.done_writing()
                    return
                await self._news_or(beat_s)
                if not self._outbox and not self._closing:
                    await call.write(HEARTBEAT)
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the stream is over, which the reader finds out with its reason

    async def _news_or(self, timeout_s: float | None) -> None:
        news = self._news = self._loop.create_future()
        alarm = None if timeout_s is None else self._loop.call_later(timeout_s, self._wake)
        try:
            await news
        finally:
            self._news = None
            if alarm is not None:
                alarm.cancel()

    def _beat_s(self) -> float:
        joined = self._recital.joined
        assert isinstance(joined, AgentJoined)
        return joined.spec.lease_s / 4.0


def _nobody_asks(_held: bool) -> None:
    pass


def _judged(error: grpc.aio.AioRpcError) -> Exception:
    code, words = error.code(), error.details() or "no reason given"
    if code in _FOR_GOOD:
        return _Hopeless(Refused(f"the rendezvous refuses this agent: {words}", _FOR_GOOD[code]))
    silent = "ping timeout" in words or "keepalive" in words  # gRPC tells it in words only
    return _Broken(f"{code.name.lower().replace('_', ' ')}: {words}", silent=silent)


def _unreachable(words: dict[str, str]) -> str:
    tried = "; ".join(f"{endpoint}: {why[-300:]}" for endpoint, why in words.items())
    return f"cannot reach the rendezvous ({tried}). Is it running, is the address right, is the port open?"
