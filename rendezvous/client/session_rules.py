"""The rules of an agent's session, which outlives streams, services and addresses. Pure; see `remote_session`.

Theory of operation
-------------------
    IDLE --first join--> STREAMING --stream ended--> PAUSING --pause over--> STREAMING ...
                             |                          |
                             +--- refused, gave up, closed ---> OVER

A session holds one stream at a time. Each stream begins with everything that the agent would have to say again
(`SessionReplay`), so messages that were lost with the last stream are not missed. Between streams the session
pauses: briefly after a stream that worked, and longer after each further failure, with jitter so that agents do not
return in step.

The session follows a redirect, unless the address it names fell silent a moment ago. It prefers other endpoints to
one that fell silent. It gives up only if trying again cannot help (`StreamFailed.refused`), or if it never reached
any service within `give_up_s`. It reports that as `Refused`, like any refusal by the service.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from rendezvous.session_replay import Redirect, SessionReplay
from rendezvous.values.events import AgentJoined, Refused, Waiting

if TYPE_CHECKING:
    from rendezvous.values.events import FromAgent, ToAgent

PATIENCE_S = 1.6  # for the answer to a ping
PING_AFTER_S = 0.8  # with nothing heard
CONNECT_S = 3.0

_FIRST_ANSWER_S = 8.0
_PAUSE_S = 0.05  # the first pause between streams; they double ...
_LONGEST_PAUSE_S = 5.0  # ... up to this one
_DOUBLINGS_IF_ANSWERED = 3  # a replica is there, and the job's next owner soon will be
_EARLY_WORD_S = 4.0
_TLS_PROBLEM_S = 20.0  # certificates that are just being installed may not match for this long
_RECENT_S = 60.0
_RECONNECT_S = 0.6  # a link that was cut may be back a moment after the first packet was lost on it
_SHUNNED_S = 10.0  # a frozen endpoint costs seconds with each try
_LONGEST_PATIENCE_S = 20.0
_CROWD = 400  # agents: more of them ping less often, and wait longer for the answer ...
_MOST_LEISURE = 5.0  # ... by as many times, up to this: the service may be busy with all the others
_TRY_AGAIN, _NOT_ALLOWED = 75, 77


class Link(StrEnum):
    IDLE = "idle"  # the agent has not joined yet
    STREAMING = "streaming"
    PAUSING = "pausing"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Silence:
    """`at`: when `endpoint` last fell silent."""

    endpoint: str
    at: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the latest stream to `endpoint` failed. `is_tls`: the two ends will not understand each other."""

    endpoint: str
    reason: str
    is_tls: bool


@dataclass(frozen=True, slots=True)
class SessionState:
    endpoints: tuple[str, ...]
    give_up_s: float
    started_at: float
    at: int = 0  # the endpoint to use next, unless a redirect names another
    link: Link = Link.IDLE
    endpoint: str = ""  # of the current stream
    replay: SessionReplay = SessionReplay()
    redirect: Redirect | None = None  # received on the current stream
    worked: bool = False  # the current stream brought a message
    was_reached: bool = False  # any stream did
    is_closing: bool = False
    failures: int = 0  # streams in a row that did not work
    connect_s: float = CONNECT_S  # for the next stream
    silent_streams: tuple[float, ...] = ()  # when streams fell silent before they had brought a message
    silences: tuple[Silence, ...] = ()
    problems: tuple[Problem, ...] = ()
    told_early: bool = False


# --- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """The agent sends a message."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class Received:
    message: ToAgent | Redirect


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The service ended it in good order."""


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """`silent`: nothing was heard any more. `tls_problem`: what a probe of the endpoint found.

    `refused`: trying again cannot help. `curable`: it can, once a service was reached (certificates that are being
    replaced, a token that is being renewed).
    """

    reason: str
    silent: bool = False
    tls_problem: str = ""
    refused: Refused | None = None
    curable: bool = False


@dataclass(frozen=True, slots=True)
class PauseOver:
    pass


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """Deliver what was said, then end."""


SessionEvent = Said | Received | StreamEnded | StreamFailed | PauseOver | CloseRequested

# --- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStream:
    """`messages` come first on the stream, before anything that is said later."""

    endpoint: str
    messages: tuple[FromAgent, ...]
    patience_s: float
    ping_after_s: float
    connect_s: float
    first_answer_s: float


@dataclass(frozen=True, slots=True)
class Write:
    messages: tuple[FromAgent, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """To the agent."""

    message: ToAgent


@dataclass(frozen=True, slots=True)
class ContactChanged:
    held: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """For a random time between the two."""

    least_s: float
    most_s: float


SessionEffect = OpenStream | Write | Deliver | ContactChanged | Pause
SessionStep = tuple[SessionState, tuple[SessionEffect, ...]]


def step(state: SessionState, event: SessionEvent, now: float) -> SessionStep:
    if state.link is Link.OVER:
        return state, ()
    match event:
        case Said(message):
            return _said(state, message, now)
        case Received(message):
            return _received(state, message) if state.link is Link.STREAMING else (state, ())
        case StreamEnded():
            return _between(state, now) if state.link is Link.STREAMING else (state, ())
        case StreamFailed():
            return _failed(state, event, now) if state.link is Link.STREAMING else (state, ())
        case PauseOver():
            return _open(state, now) if state.link is Link.PAUSING else (state, ())
        case CloseRequested():
            link = Link.OVER if state.link is Link.IDLE else state.link
            return replace(state, is_closing=True, link=link), ()
        case _:
            assert_never(event)


def _said(state: SessionState, message: FromAgent, now: float) -> SessionStep:
    state = replace(state, replay=state.replay.said(message))
    match state.link:
        case Link.IDLE if state.replay.joined is not None:
            return _open(state, now)
        case Link.STREAMING:
            return state, (Write((message,)),)
        case _:
            return state, ()


def _open(state: SessionState, now: float) -> SessionStep:
    endpoint = _redirected_to(state, now) or state.endpoints[state.at]
    recent = tuple(at for at in state.silent_streams if at > now - _RECENT_S)
    leisure, connect_s = _leisure(state), state.connect_s
    state = replace(
        state,
        link=Link.STREAMING,
        endpoint=endpoint,
        redirect=None,
        worked=False,
        connect_s=CONNECT_S,
        silent_streams=recent,
    )
    patience_s = patience(state)
    stream = OpenStream(
        endpoint,
        state.replay.lines(),
        patience_s,
        PING_AFTER_S * leisure,
        connect_s,
        _FIRST_ANSWER_S * leisure + patience_s,
    )
    return state, (stream,)


def patience(state: SessionState) -> float:
    """Longer with each recent stream that did not bring a message.

    A service that is merely busy, with thousands of agents joining, must not be made busier by agents that
    leave it and come back. One that has answered is not as busy as that: what falls silent then is most often the
    link, and on one that is cut again and again the node would be lost while we waited.
    """
    return min(_LONGEST_PATIENCE_S, float(_leisure(state) * PATIENCE_S * 2 ** len(state.silent_streams)))


def _leisure(state: SessionState) -> float:
    joined = state.replay.joined
    nodes = 0 if joined is None else joined.spec.max_nodes
    return min(max(1.0, nodes / _CROWD), _MOST_LEISURE)


def heartbeat_every_s(state: SessionState) -> float:
    joined = state.replay.joined
    assert isinstance(joined, AgentJoined)
    return joined.spec.lease_s / 4.0


def _received(state: SessionState, message: ToAgent | Redirect) -> SessionStep:
    if isinstance(message, Redirect):
        return replace(state, redirect=message), ()
    contact = () if state.worked else (ContactChanged(True),)
    reports = state.replay.asked_for_by(message)
    again = (Write(reports),) if reports else ()
    state = replace(state, worked=True, was_reached=True, replay=state.replay.heard(message))
    return state, (*contact, *again, Deliver(message))


# --- between streams -------------------------------------------------------------------------------


def _failed(state: SessionState, event: StreamFailed, now: float) -> SessionStep:
    if event.refused is not None and not (event.curable and state.was_reached):
        return replace(state, link=Link.OVER), (Deliver(event.refused),)
    problem = Problem(state.endpoint, event.tls_problem or event.reason, bool(event.tls_problem))
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
        return replace(state, link=Link.OVER), ()
    lost = (ContactChanged(False),) if state.worked else ()
    state = replace(state, link=Link.PAUSING, failures=_failures(state))
    if (refused := _given_up(state, now)) is not None:
        return replace(state, link=Link.OVER), (*lost, Deliver(refused))
    state, early = _early_word(state, now)
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
        return Refused("; ".join(dict.fromkeys(found)), _NOT_ALLOWED)
    return Refused(_unreachable(state), _TRY_AGAIN) if for_s > state.give_up_s else None


def _early_word(state: SessionState, now: float) -> SessionStep:
    """Once, long before it is given up, so that the user sees a wrong address soon."""
    if state.was_reached or state.told_early or now - state.started_at < _EARLY_WORD_S:
        return state, ()
    trying = f"{_unreachable(state)} Trying on for {state.give_up_s:g} s"
    return replace(state, told_early=True), (Deliver(Waiting(trying, 0, 1, stands_by=True)),)


def _unreachable(state: SessionState) -> str:
    tried = "; ".join(f"{known.endpoint}: {known.reason[-300:]}" for known in state.problems)
    return f"cannot reach the rendezvous ({tried}). Is it running, is the address right, is the port open?"


def _next(state: SessionState, now: float) -> int:
    """Preferably not the endpoint of the stream that just ended, nor one that fell silent a moment ago."""
    n = len(state.endpoints)
    others = [
        i % n for i in range(state.at + 1, state.at + n + 1) if state.endpoints[i % n] != state.endpoint
    ]
    awake = (i for i in (*others, state.at) if not _is_shunned(state, state.endpoints[i], now))
    return next(awake, others[0] if others else state.at)


def _is_shunned(state: SessionState, endpoint: str, now: float) -> bool:
    return any(known.endpoint == endpoint and now - known.at < _SHUNNED_S for known in state.silences)


def _redirected_to(state: SessionState, now: float) -> str:
    """Not to an address that fell silent: the replica that sends us there has not noticed yet."""
    if state.redirect is None or _is_shunned(state, state.redirect.address, now):
        return ""
    return state.redirect.address


def _pause(state: SessionState, now: float) -> Pause:
    """All endpoints are tried before the pause grows."""
    if state.redirect is not None:
        after_s = state.redirect.after_s
        after_s = after_s if _redirected_to(state, now) else max(_PAUSE_S, after_s)
        return Pause(after_s, after_s * 1.5)
    rounds = min(state.failures // len(state.endpoints), 10)
    longest_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**rounds)
    return Pause(0.2 * longest_s, longest_s)
