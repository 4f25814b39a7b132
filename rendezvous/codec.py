"""Conversion between protobuf and the domain's values. Only this module uses both.

A dataclass and its message have the same field names, and a StrEnum and its proto enum have the same members. So the
encoders and decoders are built from the annotations, once per class; only a few classes have another name on the wire
(a test compares both sides). Reading is strict. It raises only `BadMessage`: for a missing part, an unknown enum value,
a number that is not finite, or a text that is too long. Long tracebacks and reasons are useful too, so they are
accepted and shortened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from rendezvous import session_replay
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds import event_log, view
from rendezvous.session_replay import Redirect
from rendezvous.values import events, questions, rank_time, rank_view, types
from rendezvous.values.events import FromAgent, ToAgent
from rendezvous.values.questions import FromConversation, Wanted
from rendezvous.values.text_limits import NAME, TextLimit
from rendezvous.values.types import AgentId

T = TypeVar("T")

HEARTBEAT = pb.AgentMessage(heartbeat=pb.Heartbeat()).SerializeToString()
PROGRESS = pb.AgentMessage(heartbeat=pb.Heartbeat(progress=True)).SerializeToString()


class BadMessage(ValueError):
    """A message does not follow the schema or its limits."""


# --- which class is which message -----------------------------------------------------------------------

_NAMES_ON_THE_WIRE = {
    "AgentJoined": "Join",
    "AgentLeft": "Leave",
    "AgentHeard": "Heartbeat",
    "LoggedEvent": "Note",
}


def _messages() -> dict[type, Any]:
    modules = (types, events, event_log, view, rank_time, rank_view, questions, session_replay)
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    named = {kind: getattr(pb, _NAMES_ON_THE_WIRE.get(kind.__name__, kind.__name__), None) for kind in kinds}
    return {kind: message for kind, message in named.items() if isinstance(message, type)}


_MESSAGES = _messages()


def _bodies(message: Any) -> dict[str, Any]:
    """The classes of the parts of which a message has one, by the names of these parts."""
    kinds = {of.DESCRIPTOR.name: kind for kind, of in _MESSAGES.items()}
    return {
        part.name: kinds[part.message_type.name] for part in message.DESCRIPTOR.oneofs_by_name["body"].fields
    }


_FROM_AGENT, _TO_AGENT = _bodies(pb.AgentMessage), _bodies(pb.ServiceMessage)
_QUESTIONS, _ANSWERS = _bodies(pb.Question), _bodies(pb.AgentAnswer)
_TABLES = (_FROM_AGENT, _TO_AGENT, _QUESTIONS, _ANSWERS)
_BODY_OF = {kind: body for table in _TABLES for body, kind in table.items()}

# The stream identifies the agent: only the join, which opens the stream, names it.
_OF_THE_STREAM = tuple(kind for kind in _FROM_AGENT.values() if kind is not events.AgentJoined)


# --- messages on streams ---------------------------------------------------------------------------------


def from_agent_bytes(message: FromAgent) -> bytes:
    body = _BODY_OF[type(message)]
    return pb.AgentMessage(**{body: encode(message)}).SerializeToString()


def to_agent_bytes(message: ToAgent | Redirect) -> bytes:
    body = _BODY_OF[type(message)]
    return pb.ServiceMessage(**{body: encode(message)}).SerializeToString()


def read_from_agent(data: bytes, agent: AgentId | None) -> FromAgent:
    """Read a message of `agent`; None for the first message of a stream, which must be a join."""
    if data in (HEARTBEAT, PROGRESS) and agent is not None:
        return events.AgentHeard(agent, progress=data == PROGRESS)
    message = _parsed(pb.AgentMessage, data)
    kind, body = _body(message, _FROM_AGENT)
    if kind is events.AgentJoined:
        joined: events.AgentJoined = decode(kind, body)
        return joined
    if agent is None:
        raise BadMessage("the first message of a stream must be a join")
    return _row(kind).decode(body, agent=agent)  # type: ignore[no-any-return]


def read_to_agent(data: bytes) -> ToAgent | Redirect:
    return decode(*_body(_parsed(pb.ServiceMessage, data), _TO_AGENT))  # type: ignore[no-any-return]


def question_message(number: int, wanted: Wanted) -> Any:
    return pb.Question(id=number, **{_BODY_OF[type(wanted)]: encode(wanted)})


def read_question(data: bytes) -> tuple[int, Wanted | None]:
    """The number of the question, and what it asks; None if a newer version wrote it."""
    message = _parsed(pb.Question, data)
    return message.id, wanted_in(message) if message.WhichOneof("body") else None


def wanted_in(message: Any) -> Wanted:
    """What a Question asks. Raises `BadMessage`."""
    return decode(*_body(message, _QUESTIONS))  # type: ignore[no-any-return]


def answer_message(number: int, told: FromConversation) -> Any:
    return pb.AgentAnswer(id=number, **{_BODY_OF[type(told)]: encode(told)})


def read_answer(data: bytes) -> tuple[int, FromConversation]:
    message = _parsed(pb.AgentAnswer, data)
    return message.id, told_in(message)


def told_in(message: Any) -> FromConversation:
    """What an AgentAnswer says. Raises `BadMessage`."""
    return decode(*_body(message, _ANSWERS))  # type: ignore[no-any-return]


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"cannot decode the message as {kind.DESCRIPTOR.name}") from error


def _body(message: Any, table: dict[str, Any]) -> tuple[Any, Any]:
    body = message.WhichOneof("body")
    if body is None:
        raise BadMessage(
            f"the {message.DESCRIPTOR.name} is empty, or a newer version wrote it: use the same version on both sides"
        )
    return table[body], getattr(message, body)


# --- any value of the table --------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    try:
        return _row(type(value)).encode(value)
    except (ValueError, TypeError) as error:  # a number outside the range of the schema
        raise BadMessage(f"{type(value).__name__}: {error}") from error


def decode(kind: type[T], message: Message) -> T:
    return _row(kind).decode(message)  # type: ignore[no-any-return]


class _Row:
    """The encoder and decoder of one dataclass."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._message = kind, _MESSAGES[kind]
        hints = get_type_hints(kind, include_extras=True)
        names = [f.name for f in fields(kind)]
        if kind in _OF_THE_STREAM:
            names.remove("agent")
        absent = {f.name: f.default for f in fields(kind) if f.metadata.get("optional")}
        self._fields = [(name, *_field(name, hints[name], absent.get(name))) for name in names]

    def encode(self, value: Any) -> Any:
        cells = {name: write(getattr(value, name)) for name, write, _ in self._fields}
        return self._message(**cells)

    def decode(self, message: Any, **given: Any) -> Any:
        for name, _, read in self._fields:
            given[name] = read(message)
        return self._kind(**given)


_row: Callable[[Any], _Row] = cache(_Row)


def _field(name: str, hint: Any, if_absent: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The functions that write the field's value, and read it from its message. `if_absent` None: it is required."""
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        write, read = _value(name, parts[0])
        return (lambda v: [write(x) for x in v]), (lambda m: tuple(read(x) for x in getattr(m, name)))
    if get_origin(hint) is UnionType:
        (inner,) = (part for part in parts if part is not NoneType)
        write, read = _value(name, inner)
        return (
            lambda v: None if v is None else write(v),
            lambda m: read(getattr(m, name)) if m.HasField(name) else None,
        )
    write, read = _value(name, hint)
    if if_absent is not None:
        return write, lambda m: read(getattr(m, name)) if m.HasField(name) else if_absent
    if is_dataclass(hint):
        return write, lambda m: read(_required(m, name))
    return write, lambda m: read(getattr(m, name))


def _required(message: Any, name: str) -> Any:
    if not message.HasField(name):
        raise BadMessage(f"{message.DESCRIPTOR.name}: field {name} is missing")
    return getattr(message, name)


def _value(name: str, kind: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if get_origin(kind) is Annotated:
        return _text(name, get_args(kind)[1])
    if kind is types.JobSpec:
        return encode, _read_spec
    if is_dataclass(kind):
        return encode, lambda m: _row(kind).decode(m)
    if issubclass(kind, StrEnum):
        return _enum(kind)
    if kind is str:
        return _text(name, NAME)
    if kind is float:
        return float, lambda v: _finite(name, v)
    return _same, _same


def _same(value: Any) -> Any:
    return value


_SPECS: dict[bytes, types.JobSpec] = {}  # all agents of a job send the same bytes
_SPECS_KEPT = 64


def _read_spec(message: Any) -> types.JobSpec:
    data = message.SerializeToString(deterministic=True)
    spec = _SPECS.get(data)
    if spec is None:
        if len(_SPECS) >= _SPECS_KEPT:
            _SPECS.clear()
        spec = _SPECS[data] = _row(types.JobSpec).decode(message)
    return spec


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise BadMessage(f"{name} = {value}: expected a finite number")
    return value


def _text(name: str, limit: TextLimit) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    def write(value: str) -> str:
        if limit.is_shortened:
            value = limit.applied(value)
        return value if value.isascii() else value.encode("utf-8", "replace").decode()

    def read(value: str) -> str:
        try:
            return limit.applied(value)
        except ValueError as error:
            raise BadMessage(f"{name} is too long: {error}") from None

    return write, read


def _enum(kind: type[StrEnum]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    prefix = "".join(f"_{c}" if c.isupper() else c for c in kind.__name__).strip("_").upper()
    numbers = pb.DESCRIPTOR.enum_types_by_name[kind.__name__].values_by_name
    to_number = {member: numbers[f"{prefix}_{member.name}"].number for member in kind}
    to_member = {number: member for member, number in to_number.items()}

    def read(number: int) -> StrEnum:
        if number not in to_member:
            raise BadMessage(
                f"unknown value {number} of {kind.__name__}; the sender may have a newer version"
            )
        return to_member[number]

    return to_number.__getitem__, read
