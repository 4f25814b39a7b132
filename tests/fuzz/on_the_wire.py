"""What comes over the network: to the service, to an agent, out of the store."""

from __future__ import annotations

import json
import zlib
from base64 import urlsafe_b64encode
from dataclasses import replace

from google.protobuf.message import DecodeError
from lives import AGENTS, WAITING, changed, cut_up, joined_up

from rendezvous import codec
from rendezvous.access import auth
from rendezvous.access.auth import BadToken, Grant, Key, Role
from rendezvous.codec import BadMessage, read_from_agent, read_to_agent
from rendezvous.machine import step
from rendezvous.rounds import snapshot
from rendezvous.rounds.admission import join_problem, reported_state_problem
from rendezvous.rounds.event_log import lines
from rendezvous.rounds.sealing import fitted
from rendezvous.rounds.snapshot import SnapshotUnreadable, decode_state, encode_state
from rendezvous.rounds.view import summary_of, view_of
from rendezvous.service import server
from rendezvous.service.web import Web
from rendezvous.session_replay import Redirect, SessionReplay
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointTaken,
    DeadlineReached,
    Ended,
    Examined,
    NodeHealth,
    PhaseTimesReported,
    RankFailed,
    RanksFinished,
    RanksStalled,
    Refused,
    SetDeadline,
    Stop,
    StoreAt,
    StoreOpened,
    Tell,
    Waiting,
)
from rendezvous.values.job_state import JobState
from rendezvous.values.rank_time import PhaseTimes
from rendezvous.values.rank_view import Collective, GroupView, RankPhase, RankReport
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    RestartBudget,
    StoreAddress,
)

_SECRETS = (Key("k", b"0123456789abcdef"),)
_SPEC = JobSpec("job", 1, 3, "train.py", budget=RestartBudget(3))


# --- messages of agents, and what the service makes of them ----------------------------------------------


def agent_message(data: bytes) -> None:
    """The first byte says whether the stream is known already."""
    agent = AGENTS[0] if data[:1] > b"\x7f" else None
    message = read_from_agent(data[1:], agent)
    again = read_from_agent(codec.from_agent_bytes(message), agent or message.agent)
    assert again == message, (message, again)
    if isinstance(message, AgentJoined):
        join_problem(message.agent, message.spec, message.facts) or reported_state_problem(
            message.generation, message.running
        )


def to_agent(data: bytes) -> None:
    """A service that lies: the agent reads it, and remembers what it would have to say again."""
    message = read_to_agent(data)
    assert read_to_agent(codec.to_agent_bytes(message)) == message
    replay = SessionReplay().sent(AgentJoined(AGENTS[0], _SPEC, NodeFacts("a", "127.0.0.1", 1)))
    if not isinstance(message, Redirect):
        for line in replay.received(message).messages():
            codec.from_agent_bytes(line)


def job(data: bytes) -> None:
    """Agents that say what they like, when they like: the machine takes it, and what it says can be sent and kept."""
    state, now = JobState(), 0.0
    for choice, part in cut_up(data):
        now += (choice >> 4) ** 2 / 4
        agent = AGENTS[choice & 3]
        event = DeadlineReached() if choice & WAITING else _admitted(part, agent)
        if event is not None:
            state = _stepped(state, event, now)
    kept = decode_state(encode_state(state))
    assert encode_state(kept) == encode_state(state)
    codec.encode(view_of("job", state, now))
    codec.encode(summary_of("job", state))


def _admitted(part: bytes, agent: AgentId):  # type: ignore[no-untyped-def]
    """As rendezvous.service.server and attendance let it through; None: they do not."""
    try:
        message = read_from_agent(part, agent)
    except BadMessage:
        return None
    if isinstance(message, AgentJoined):
        message = replace(message, agent=agent)
        if join_problem(agent, message.spec, message.facts) or reported_state_problem(
            message.generation, message.running
        ):
            return None
    return message


def _stepped(state: JobState, event, now: float) -> JobState:  # type: ignore[no-untyped-def]
    after, effects = step(state, event, now)
    for effect in effects:
        match effect:
            case Tell(_, message):
                told = codec.to_agent_bytes(fitted(message, lambda m: len(codec.to_agent_bytes(m))))
                read_to_agent(told)
            case SetDeadline(at):
                assert at is None or at < float("inf")
    for line in lines(event, state, after):
        assert line.text, line
    return after


# --- small decoders --------------------------------------------------------------------------------------


def stored_job(data: bytes) -> None:
    """A damaged record in the store. After a byte below 128 comes what a record holds when it is unpacked."""
    record = data[1:] if data[:1] > b"\x7f" else snapshot._MAGIC + zlib.compress(data[1:])
    state = decode_state(record)
    assert decode_state(encode_state(state)) == state


def token(data: bytes) -> None:
    """As it comes; and again as what somebody with the key has signed."""
    text = data.decode("latin-1")
    payload = urlsafe_b64encode(data).rstrip(b"=").decode()
    signed = f"k.{payload}"
    try:
        grant = auth.verify(f"{signed}.{auth._signature(signed, _SECRETS[0])}", _SECRETS, 0.0)
        assert grant.until > 0.0
        grant.covers("job")
    except BadToken:
        pass
    auth.verify(text, _SECRETS, 0.0)


def http_request(data: bytes) -> None:
    web = Web(lambda: True, lambda: "up 1\n")
    head, _, body = web._answer(data + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 405"))
    assert not (body and data.startswith(b"HEAD "))


def health_check(data: bytes) -> None:
    server._service(data).encode()


def schema_question(data: bytes) -> None:
    server.Reflection(("rendezvous.v1.Agents",)).answer(data)


# --- seeds -------------------------------------------------------------------------------------------------

_CAUSE = Cause("a", 1, 1, FailureClass.USER_EXCEPTION, "ValueError: bad", 1, step=3, traceback="Traceback")
_PLACE = Assignment(1, 0, 2, 0, 1, 2, "default", 0, 2, 0, 3, "127.0.0.1")
_SIGHT = RankReport(
    1,
    phase=RankPhase.COMMUNICATE,
    stalled_s=99.0,
    limit_s=9.0,
    calls=(Collective(1, "0", 1, "all_reduce"),),
    groups=(GroupView("0", 2, "0-1", 1, 0),),
)
_A, _B = AGENTS[:2]


def _joins(agent: AgentId, **more: object) -> AgentJoined:
    return AgentJoined(agent, replace(_SPEC, **more), NodeFacts(agent.node, "127.0.0.1", 1))  # type: ignore[arg-type]


_SAID = (
    _joins(_A),
    replace(_joins(_A), generation=1, running=_PLACE),
    AgentHeard(_A),
    AgentLeft(_A, "drained"),
    StoreOpened(_A, 1, StoreAddress("127.0.0.1", 1234)),
    RankFailed(_A, 1, _CAUSE),
    RanksFinished(_A, 1),
    AgentStopped(_A, 1),
    CheckpointTaken(_A, 1),
    RanksStalled(_A, 1),
    Examined(_A, 1, (_SIGHT, replace(_SIGHT, rank=0, stalled_s=0.0))),
    PhaseTimesReported(_A, 1, (PhaseTimes(0, 10, 1.0, 2.0), PhaseTimes(1, 10, 9.0, 2.0))),
    NodeHealth(_A, "a GPU is hot", ("a GPU is hot",)),
)
_TOLD = (
    Waiting("for 1 more node", 1, 2),
    Refused("there is no room", 75, retryable=True),
    Assigned(_PLACE),
    StoreAt(1, StoreAddress("127.0.0.1", 1234)),
    Stop(1, Decision(DecisionKind.RESTART, "rank 1 failed", 1, _CAUSE)),
    Ended(Outcome(False, "rank 1 failed", 1, _CAUSE, (_CAUSE,), 1)),
    Redirect("127.0.0.1:1", 0.5, "elsewhere"),
)


def _life(*turns: tuple[int, object]) -> bytes:
    """Who speaks (and how long after the one before), and what."""
    return joined_up([(choice, codec.from_agent_bytes(event)) for choice, event in turns])  # type: ignore[arg-type]


_TWO = _joins(_A, min_nodes=2)
_BEGUN = (
    (0, _TWO),
    (1, replace(_TWO, agent=_B, facts=NodeFacts("b", "127.0.0.2", 1))),
    (0x44, AgentHeard(_A)),
    (0, StoreOpened(_A, 1, StoreAddress("127.0.0.1", 1234))),
)
_LIVES = (
    (*_BEGUN, (0, RanksFinished(_A, 1)), (1, RanksFinished(_B, 1))),
    (*_BEGUN, (0, RankFailed(_A, 1, _CAUSE)), (0, AgentStopped(_A, 1)), (1, AgentStopped(_B, 1))),
    (
        *_BEGUN,
        (0x20, RanksStalled(_A, 1)),
        (0, _SAID[10]),
        (1, replace(_SAID[10], agent=_B)),
        (0xF4, _SAID[2]),
    ),
    (*_BEGUN, (0, _SAID[11]), (1, replace(_SAID[11], agent=_B)), (0, NodeHealth(_A, "hot", ("hot",)))),
    (*_BEGUN, (2, replace(_TWO, agent=AGENTS[2])), (1, AgentLeft(_B, "drained")), (0xF4, _SAID[2])),
    ((0, _SAID[1]), (1, replace(_SAID[1], agent=_B)), (0xF4, _SAID[2])),
)


def _stored() -> bytes:
    state = JobState()
    for choice, part in cut_up(_life(*_LIVES[1])):
        event = DeadlineReached() if choice & WAITING else _admitted(part, AGENTS[choice & 3])
        state = step(state, event, 1.0)[0]
    return encode_state(state)


_GRANT = Grant("id", "team-*", Role.AGENT, 1e12)
_FIELDS = {"id": "id", "job": "*", "role": "viewer", "until": 1e12}
TARGETS = (
    (
        "agent_message",
        agent_message,
        (BadMessage,),
        (
            *tuple(b"\xff" + codec.from_agent_bytes(each) for each in _SAID),
            b"\x00" + codec.from_agent_bytes(_SAID[1]),
        ),
    ),
    ("to_agent", to_agent, (BadMessage,), tuple(codec.to_agent_bytes(each) for each in _TOLD)),
    ("job", job, (), tuple(_life(*each) for each in _LIVES), 4096, changed),
    (
        "stored_job",
        stored_job,
        (SnapshotUnreadable,),
        (b"\x00" + zlib.decompress(_stored()[len(snapshot._MAGIC) :]), b"\xff" + _stored()),
        8192,
    ),
    ("token", token, (BadToken,), (json.dumps(_FIELDS).encode(), auth.sign(_GRANT, _SECRETS[0]).encode())),
    ("http_request", http_request, (), (b"GET /metrics?x HTTP/1.1\r\nHost: a", b"HEAD /livez HTTP/1.0")),
    ("health_check", health_check, (), (b"", b"\n\x14rendezvous.v1.Agents")),
    (
        "schema_question",
        schema_question,
        (DecodeError, UnicodeDecodeError),
        (b":\x00", b'"\x14rendezvous.v1.Agents', b"\x1a\x07abc.xyz"),
    ),
)
