"""The rules of an agent's session. It continues if the stream, the service or its address changes. Pure (no I/O).

Theory of operation
-------------------
    IDLE --first join--> STREAMING --stream ended--> PAUSING --pause over--> STREAMING ...
                             |                          |
                             +--- refused, gave up, closed ---> OVER

A session holds one stream at a time. Each stream begins with a replay (`SessionReplay`), so messages that were lost
with the last stream are sent again. Between streams the session pauses: briefly after a stream that worked, and
longer after each further failure. The pauses have jitter, so that agents do not reconnect all at once.

The session follows a redirect, unless that endpoint stopped answering recently. It prefers other endpoints to one that
stopped answering. It gives up only if a retry cannot help (`StreamFailed.refused`), or if it has not reached any
service within `give_up_s`. It reports this as `Refused`, like any refusal by the service. `remote_session` does the
I/O.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from rendezvous.session_replay import Redirect, SessionReplay
from rendezvous.values.contracts import NOT_ALLOWED, TRY_AGAIN
from rendezvous.values.events import AgentJoined, FromAgent, Refused, ToAgent, Waiting
from rendezvous.values.late_dataclass import dataclass

PATIENCE_S = 1.6  # how long to wait for the answer to a ping
PING_AFTER_S = 0.8  # ping after this time without a message
CONNECT_S = 3.0

_FIRST_ANSWER_S = 8.0
_PAUSE_S = 0.05  # the first pause between streams; pauses double ...
_LONGEST_PAUSE_S = 5.0  # ... up to this one
_DOUBLINGS_IF_ANSWERED = 3  # a replica answers, so the job will soon have an owner
_EARLY_WARNING_S = 4.0
_TLS_PROBLEM_S = 20.0  # certificates that are being replaced may not match for this long
_RECENT_S = 60.0
_RECONNECT_S = 0.6  # a broken link may recover a moment after the first lost packet
_AVOIDED_S = 10.0  # each attempt to reach an unresponsive endpoint takes seconds
_LONGEST_PATIENCE_S = 20.0
_CROWD = 400  # agents: more of them wait longer in proportion, as the service may be busy with the others ...
_MAX_TIME_FACTOR = 5.0  # ... and ping less often, up to this factor
_LONGEST_CONNECT_S = 30.0
_QUESTIONS_AFTER_S = 0.1  # until the service has read the join
_QUESTIONS_PER_S = 500.0  # all agents of a job together open so many streams of questions
_QUESTIONS_LATEST_S = 10.0


class StreamState(StrEnum):
    IDLE = "idle"  # the agent has not joined yet
    STREAMING = "streaming"
    PAUSING = "pausing"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Silence:
    """`at`: when `endpoint` last stopped answering."""

    endpoint: str
    at: float


@dataclass(frozen=True, slots=True)
class StreamProblem:
    """Why the latest stream to `endpoint` failed. `is_tls`: the TLS settings of client and service do not match."""

    endpoint: str
    reason: str
    is_tls: bool


@dataclass(frozen=True, slots=True)
class SessionState:
    endpoints: tuple[str, ...]
    give_up_s: float
    started_at: float
    at: int = 0  # the endpoint to use next, unless a redirect names another
    link: StreamState = StreamState.IDLE
    endpoint: str = ""  # of the current stream
    replay: SessionReplay = SessionReplay()
    redirect: Redirect | None = None  # received on the current stream
    worked: bool = False  # the current stream has delivered a message
    was_reached: bool = False  # any stream has delivered a message
    is_closing: bool = False
    failures: int = 0  # streams in a row that did not work
    connect_s: float = CONNECT_S  # for the next stream
    silent_streams: tuple[
        float, ...
    ] = ()  # when streams stopped answering before they had delivered a message
    silences: tuple[Silence, ...] = ()
    problems: tuple[StreamProblem, ...] = ()
    has_warned: bool = False


# --- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageSent:
    """The agent sends a message."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    message: ToAgent | Redirect


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The service ended the stream with status OK."""


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """A stream failed. `silent`: the service stopped answering. `tls_problem`: the result of the TLS probe.

    `refused`: a retry cannot help. `may_recover`: retry nevertheless if a service was reached before, because
    certificates or a token may be being replaced.
    """

    reason: str
    silent: bool = False
    tls_problem: str = ""
    refused: Refused | None = None
    may_recover: bool = False


@dataclass(frozen=True, slots=True)
class PauseEnded:
    pass


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """Deliver the queued messages, then end."""


SessionEvent = MessageSent | ReceivedMessage | StreamEnded | StreamFailed | PauseEnded | CloseRequested

# --- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream. `messages` are sent first, before any later message."""

    endpoint: str
    messages: tuple[FromAgent, ...]
    patience_s: float
    ping_after_s: float
    connect_s: float
    first_answer_s: float
    questions_after_s: float  # open the stream of questions after about this time


@dataclass(frozen=True, slots=True)
class Write:
    messages: tuple[FromAgent, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver a message to the agent."""

    message: ToAgent


@dataclass(frozen=True, slots=True)
class ContactChanged:
    held: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for a random time between `least_s` and `most_s`."""

    least_s: float
    most_s: float


SessionEffect = OpenStream | Write | Deliver | ContactChanged | Pause
SessionStep = tuple[SessionState, tuple[SessionEffect, ...]]


def step(state: SessionState, event: SessionEvent, now: float) -> SessionStep:
    if state.link is StreamState.OVER:
        return state, ()
    match event:
        case MessageSent(message):
            return _send(state, message, now)
        case ReceivedMessage(message):
            return _received(state, message) if state.link is StreamState.STREAMING else (state, ())
        case StreamEnded():
            return _between(state, now) if state.link is StreamState.STREAMING else (state, ())
        case StreamFailed():
            return _failed(state, event, now) if state.link is StreamState.STREAMING else (state, ())
        case PauseEnded():
            return _open(state, now) if state.link is StreamState.PAUSING else (state, ())
        case CloseRequested():
            link = StreamState.OVER if state.link is StreamState.IDLE else state.link
            return replace(state, is_closing=True, link=link), ()
        case _:
            assert_never(event)


def _send(state: SessionState, message: FromAgent, now: float) -> SessionStep:
    if not state.replay.wants(message):
        return state, ()
    state = replace(state, replay=state.replay.sent(message))
    match state.link:
        case StreamState.IDLE if state.replay.joined is not None:
            return _open(state, now)
        case StreamState.STREAMING:
            return state, (Write((message,)),)
        case _:
            return state, ()


def _open(state: SessionState, now: float) -> SessionStep:
    endpoint = _redirected_to(state, now) or state.endpoints[state.at]
    recent = tuple(at for at in state.silent_streams if at > now - _RECENT_S)
    factor, connect_s = _time_factor(state), min(state.connect_s * _crowd_factor(state), _LONGEST_CONNECT_S)
    state = replace(
        state,
        link=StreamState.STREAMING,
        endpoint=endpoint,
        redirect=None,
        worked=False,
        connect_s=CONNECT_S,
        silent_streams=recent,
    )
    patience_s = patience(state)
    stream = OpenStream(
        endpoint,
        state.replay.messages(),
        patience_s,
        PING_AFTER_S * factor,
        connect_s,
        _FIRST_ANSWER_S * factor + patience_s,
        questions_after_s(state),
    )
    return state, (stream,)


def questions_after_s(state: SessionState) -> float:
    """How long the stream of questions waits: it costs as much as a join, and a new agent gets no questions."""
    joined = state.replay.joined
    nodes = 0 if joined is None else joined.spec.min_nodes
    return min(_QUESTIONS_LATEST_S, max(_QUESTIONS_AFTER_S, nodes / _QUESTIONS_PER_S))


def patience(state: SessionState) -> float:
    """How long to wait for the answer to a ping: longer with each recent stream that did not deliver a message.

    If thousands of agents join, the service is busy, and agents that disconnect and return would make it busier.
    A service that has answered is not that busy. If its stream then stops answering, the cause is usually the network.
    The agent must reconnect before its lease expires, so the timeout stays short.
    """
    return min(_LONGEST_PATIENCE_S, float(_crowd_factor(state) * PATIENCE_S * 2 ** len(state.silent_streams)))


def _time_factor(state: SessionState) -> float:
    return min(_crowd_factor(state), _MAX_TIME_FACTOR)


def _crowd_factor(state: SessionState) -> float:
    """How many times longer than in a small job the service may need, if all agents connect at once.

    The time to connect grows with it, and the time to answer a ping: the service may still accept the others. An agent
    that gives up and connects again goes back to the end of the queue. If the service needed more than that time for
    all of them, none would ever be through.
    """
    joined = state.replay.joined
    nodes = 0 if joined is None else joined.spec.max_nodes
    return max(1.0, nodes / _CROWD)


def heartbeat_every_s(state: SessionState) -> float:
    joined = state.replay.joined
    assert isinstance(joined, AgentJoined)
    return joined.spec.heartbeat_s


def _received(state: SessionState, message: ToAgent | Redirect) -> SessionStep:
    if isinstance(message, Redirect):
        return replace(state, redirect=message), ()
    contact = () if state.worked else (ContactChanged(True),)
    reports = state.replay.reports_for(message)
    again = (Write(reports),) if reports else ()
    state = replace(state, worked=True, was_reached=True, replay=state.replay.received(message))
    return state, (*contact, *again, Deliver(message))


# --- between streams -------------------------------------------------------------------------------


def _failed(state: SessionState, event: StreamFailed, now: float) -> SessionStep:
    if event.refused is not None and not (event.may_recover and state.was_reached):
        return replace(state, link=StreamState.OVER), (Deliver(event.refused),)
    problem = StreamProblem(state.endpoint, event.tls_problem or event.reason, bool(event.tls_problem))
    others = (known for known in state.problems if known.endpoint != state.endpoint)
    state = replace(state, problems=(*others, problem))
    return _between(_silence_noted(state, now) if event.silent else state, now)


def _silence_noted(state: SessionState, now: float) -> SessionState:
    others = (known for known in state.silences if known.endpoint != state.endpoint)
    state = replace(state, silences=(*others, Silence(state.endpoint, now)))
    if state.worked:
        return replace(state, connect_s=_RECONNECT_S)
    return replace(state, silent_streams=(*state.silent_streams, now))


def _between(state: SessionState, now: float) -> SessionStep:
    if state.is_closing:
        return replace(state, link=StreamState.OVER), ()
    lost = (ContactChanged(False),) if state.worked else ()
    state = replace(state, link=StreamState.PAUSING, failures=_failures(state))
    if (refused := _given_up(state, now)) is not None:
        return replace(state, link=StreamState.OVER), (*lost, Deliver(refused))
    state, early = _early_warning(state, now)
    if not _redirected_to(state, now):
        state = replace(state, at=_next(state, now))
    return state, (*lost, *early, _pause(state, now))


def _failures(state: SessionState) -> int:
    if state.worked:
        return 0
    if state.redirect is not None:
        return min(state.failures + 1, _DOUBLINGS_IF_ANSWERED * len(state.endpoints))
    return state.failures + 1


def _given_up(state: SessionState, now: float) -> Refused | None:
    if state.was_reached:
        return None
    for_s = now - state.started_at
    tls = {known.endpoint: known.reason for known in state.problems if known.is_tls}
    if tls.keys() >= set(state.endpoints) and for_s > min(state.give_up_s, _TLS_PROBLEM_S):
        found = (tls[endpoint] for endpoint in state.endpoints)
        return Refused("; ".join(dict.fromkeys(found)), NOT_ALLOWED)
    return Refused(_unreachable(state), TRY_AGAIN) if for_s > state.give_up_s else None


def _early_warning(state: SessionState, now: float) -> SessionStep:
    """Report once, long before giving up, so that the user notices a wrong address early."""
    if state.was_reached or state.has_warned or now - state.started_at < _EARLY_WARNING_S:
        return state, ()
    trying = f"{_unreachable(state)} Retrying; gives up {state.give_up_s:g} s after this agent started"
    return replace(state, has_warned=True), (Deliver(Waiting(trying, 0, 1, stands_by=True)),)


def _unreachable(state: SessionState) -> str:
    tried = "; ".join(f"{known.endpoint}: {known.reason[-300:]}" for known in state.problems)
    what_next = "Check the address, that the service runs, and that the port is open."
    return f"cannot reach the rendezvous ({tried}). {what_next}"


def _next(state: SessionState, now: float) -> int:
    """The next endpoint: if possible not that of the last stream, nor one that stopped answering recently."""
    n = len(state.endpoints)
    others = [
        i % n for i in range(state.at + 1, state.at + n + 1) if state.endpoints[i % n] != state.endpoint
    ]
    usable = (i for i in (*others, state.at) if not _is_avoided(state, state.endpoints[i], now))
    return next(usable, others[0] if others else state.at)


def _is_avoided(state: SessionState, endpoint: str, now: float) -> bool:
    return any(known.endpoint == endpoint and now - known.at < _AVOIDED_S for known in state.silences)


def _redirected_to(state: SessionState, now: float) -> str:
    """The address of the redirect. Empty if it stopped answering recently: the other replica may not know."""
    if state.redirect is None or _is_avoided(state, state.redirect.address, now):
        return ""
    return state.redirect.address


def _pause(state: SessionState, now: float) -> Pause:
    """The next pause. It grows only after all endpoints were tried."""
    if state.redirect is not None:
        after_s = state.redirect.after_s
        after_s = after_s if _redirected_to(state, now) else max(_PAUSE_S, after_s)
        return Pause(after_s, after_s * 1.5)
    rounds = min(state.failures // len(state.endpoints), 10)
    longest_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**rounds)
    return Pause(0.2 * longest_s, longest_s)
