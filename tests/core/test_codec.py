"""Every value goes over the wire and comes back the same; what does not follow the schema raises BadMessage."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rendezvous import codec
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.event_log import LoggedEvent
from rendezvous.rounds.view import JobView, NodeView
from rendezvous.session_replay import Redirect
from rendezvous.values import events, questions, types

AGENT = types.AgentId("node1", "a1")
TO_AGENT = (*get_args(events.ToAgent), Redirect)
FROM_AGENT = get_args(events.FromAgent)

_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXT,
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    int: st.integers(-(2**31), 2**31 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is types.AgentId:
        return st.just(AGENT)
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        return st.lists(values_of(parts[0]), max_size=2).map(tuple)
    if get_origin(hint) is UnionType:
        return st.one_of(*(st.none() if part is NoneType else values_of(part) for part in parts))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{f.name: values_of(hints[f.name]) for f in fields(hint)})
    assert issubclass(hint, StrEnum)
    return st.sampled_from(hint)


@pytest.mark.parametrize("kind", FROM_AGENT)
@settings(max_examples=25)
@given(data=st.data())
def test_what_agents_say_comes_back_the_same(kind: Any, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    assert codec.read_from_agent(codec.from_agent_bytes(message), AGENT) == message


@pytest.mark.parametrize("kind", TO_AGENT)
@settings(max_examples=25)
@given(data=st.data())
def test_what_agents_are_told_comes_back_the_same(kind: Any, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    assert codec.read_to_agent(codec.to_agent_bytes(message)) == message


@pytest.mark.parametrize("kind", get_args(questions.Wanted))
@settings(max_examples=25)
@given(data=st.data())
def test_questions_come_back_the_same(kind: Any, data: st.DataObject) -> None:
    wanted = data.draw(values_of(kind))
    message = codec.question_message(7, wanted).SerializeToString()
    assert codec.read_question(message) == (7, wanted)


@pytest.mark.parametrize("kind", get_args(questions.FromConversation))
@settings(max_examples=25)
@given(data=st.data())
def test_answers_come_back_the_same(kind: Any, data: st.DataObject) -> None:
    told = data.draw(values_of(kind))
    assert codec.read_answer(codec.answer_message(7, told).SerializeToString()) == (7, told)


def test_a_question_of_a_newer_release_is_told_from_a_damaged_one() -> None:
    newer = pb.Question(id=3).SerializeToString() + b"\xfa\x07\x00"  # field 127, which no release has
    assert codec.read_question(newer) == (3, None)
    with pytest.raises(codec.BadMessage):
        codec.read_question(b"\xff")


@pytest.mark.parametrize("kind", [JobView, LoggedEvent])
@settings(max_examples=25)
@given(data=st.data())
def test_what_operators_see_comes_back_the_same(kind: Any, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    message = codec.encode(value)
    assert codec.decode(kind, type(message).FromString(message.SerializeToString())) == value


def test_a_message_has_the_fields_of_its_dataclass_and_no_others() -> None:
    for kind, message in codec._MESSAGES.items():
        ours = {f.name for f in fields(kind)} - ({"agent"} if kind in codec._OF_THE_STREAM else set())
        assert ours == set(message.DESCRIPTOR.fields_by_name), kind


def test_every_body_of_a_stream_is_known() -> None:
    tables = {
        pb.AgentMessage: codec._FROM_AGENT,
        pb.ServiceMessage: codec._TO_AGENT,
        pb.Question: codec._QUESTIONS,
        pb.AgentAnswer: codec._ANSWERS,
    }
    for message, table in tables.items():
        assert set(table) == set(message.DESCRIPTOR.fields_by_name) - {"id"}


@given(st.binary(max_size=300))
def test_hostile_bytes_raise_bad_message_and_nothing_else(data: bytes) -> None:
    for agent in (None, AGENT):
        try:
            codec.read_from_agent(data, agent)
        except codec.BadMessage:
            pass
    try:
        codec.read_to_agent(data)
    except codec.BadMessage:
        pass


@given(st.data())
def test_a_damaged_message_raises_bad_message_and_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(codec.from_agent_bytes(data.draw(values_of(events.AgentJoined))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.read_from_agent(bytes(raw), None)
    except codec.BadMessage:
        pass


def test_the_first_message_must_be_a_join() -> None:
    for message in (events.AgentHeard(AGENT), events.RanksFinished(AGENT, 1)):
        with pytest.raises(codec.BadMessage, match="must be a join"):
            codec.read_from_agent(codec.from_agent_bytes(message), None)


def _join(**changed: Any) -> pb.AgentMessage:
    joined = events.AgentJoined(AGENT, types.JobSpec("job"), types.NodeFacts("node1", "10.0.0.1", 8))
    message = pb.AgentMessage.FromString(codec.from_agent_bytes(joined))
    for path, value in changed.items():
        *way, last = path.split("__")
        part: Any = message.join
        for name in way:
            part = getattr(part, name)
        setattr(part, last, value)
    return message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"spec__lease_s": math.nan}, "lease_s = nan"),
        ({"spec__join_timeout_s": math.inf}, "join_timeout_s = inf"),
        ({"spec__scale_up": 0}, "unknown value 0 of ScaleUp"),
        ({"spec__scale_up": 99}, "unknown value 99 of ScaleUp"),
        ({"facts__host": "h" * 300}, "host is too long: 300 characters"),
    ],
)
def test_what_is_out_of_bounds_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(codec.BadMessage, match=words):
        codec.read_from_agent(_join(**changed).SerializeToString(), None)


@pytest.mark.parametrize("part", ["agent", "spec", "facts"])
def test_a_missing_part_is_named(part: str) -> None:
    message = _join()
    message.join.ClearField(part)
    with pytest.raises(codec.BadMessage, match=f"Join: field {part} is missing"):
        codec.read_from_agent(message.SerializeToString(), None)


def test_a_number_the_schema_has_no_room_for_is_refused_where_it_is_written() -> None:
    with pytest.raises(codec.BadMessage):
        codec.encode(types.RestartBudget(2**40))


def test_a_long_traceback_keeps_its_end() -> None:
    cause = types.Cause(
        "n", 0, 0, types.FailureClass.SIGNAL, "r", 1, traceback="x" * 50_000 + "ValueError: no"
    )
    message = events.RankFailed(AGENT, 1, cause)
    read = codec.read_from_agent(codec.from_agent_bytes(message), AGENT)
    assert isinstance(read, events.RankFailed)
    assert len(read.cause.traceback) == 16 * 1024
    assert read.cause.traceback.endswith("ValueError: no")


def test_text_that_is_no_unicode_is_sent_all_the_same() -> None:
    left = events.AgentLeft(AGENT, "lone \udcff surrogate")
    assert codec.read_from_agent(codec.from_agent_bytes(left), AGENT) == events.AgentLeft(
        AGENT, "lone ? surrogate"
    )


def test_what_is_wrong_with_a_node_may_be_as_long_in_a_view_as_in_its_report() -> None:
    """A text has the limit of its field, whatever the field is called."""
    complaint = "x" * 4096
    health = events.NodeHealth(AGENT, "news", (complaint,))
    assert codec.read_from_agent(codec.from_agent_bytes(health), AGENT) == health
    node = NodeView("n", health=(complaint,))
    assert codec.decode(NodeView, codec.encode(node)) == node
    with pytest.raises(codec.BadMessage, match="health is too long: 4097 characters"):
        codec.decode(NodeView, codec.encode(NodeView("n", health=(complaint + "x",))))


def test_an_agent_of_the_release_before_recovers_by_restarts() -> None:
    """It does not send these fields: the spec that is read must be the one that its stored jobs have."""
    message = _join()
    for name in ("recover", "heal_budget"):
        message.join.spec.ClearField(name)
    joined = codec.read_from_agent(message.SerializeToString(), None)
    assert isinstance(joined, events.AgentJoined)
    assert joined.spec == types.JobSpec("job")
    assert joined.spec.recover is types.Recover.RESTART
    assert joined.spec.heal_budget.is_unlimited
    old = pb.AgentMessage(agent_stopped=pb.AgentStopped(generation=3))
    assert codec.read_from_agent(old.SerializeToString(), AGENT) == events.AgentStopped(AGENT, 3)
