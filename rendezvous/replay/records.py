"""The records of a journal: what a state machine was given, and a fingerprint of what it answered.

    magic, then a zlib stream of lines of JSON:

    {"machine": "service", "release": "0.2.0", "began": 1763900000.0, "schema": {"AgentId": ["node", ...], ...}}
    ["start", TIME, STATE]                  the state at the beginning of this file
    ["load", TIME, STATE, FINGERPRINT]      the service has read the state from its store
    ["hear", [[NODE, INCARNATION, TIME]]]   the last heartbeats before the next deadline
    ["do", TIME, [CLASS, EVENT], FINGERPRINT]

A TIME is a whole number of nanoseconds since the TIME before it. If a time cannot be written so without a change of its
last bit, it is a number of seconds. The state machines compare times, so a rounded time could change a decision.

`values/rows.py` says how a value becomes JSON. Texts are hidden (see the last section). The figures about the time
of ranks are rounded: they are most of what the service receives, and no decision depends on them.

A fingerprint is a checksum of the effects without their texts, because a replay composes texts of the hidden ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields
from hashlib import blake2b
from math import isfinite
from typing import Any
from zlib import crc32

from rendezvous.rounds.orders import DRAINED
from rendezvous.values.cause_text import OUT_OF_TIME
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import CLASSES, TimeSpent
from rendezvous.values.rows import Decoder, RowEncoder, all_fields, classes, texts_of
from rendezvous.values.types import AgentId, Outcome

# --- records ---------------------------------------------------------------------------------------

FAMILY = b"ddp-journal "
MAGIC = FAMILY + b"1\n"  # the number grows when older releases cannot read a journal
_DIGITS = 3
_NANO = 1e9
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class Machine:
    """A pure state machine: the types of its values, and its functions.

    `load` and `hear` are for records that not every machine has: a state from the store, and heartbeats.
    """

    name: str
    state: Any
    event: Any
    effect: Any
    step: Callable[[Any, Any, float], tuple[Any, tuple[Any, ...]]]
    load: Callable[[Any, float], tuple[Any, tuple[Any, ...]]] | None = None
    hear: Callable[[Any, Mapping[AgentId, float]], Any] | None = None


@dataclass(frozen=True, slots=True)
class Start:
    now: float
    state: Any


@dataclass(frozen=True, slots=True)
class Load:
    now: float
    state: Any
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Hear:
    heartbeats: Mapping[AgentId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Do:
    now: float
    event: Any
    fingerprint: int


Record = Start | Load | Hear | Do


class RecordUnreadable(ValueError):
    """A line that this release cannot read."""


def _decided(cls: Any) -> list[Field[Any]]:
    """The fields that a fingerprint covers: no texts, and not the summary of the time of ranks."""
    left_out = texts_of(cls) | ({"time"} if cls is Outcome else set())
    return [each for each in fields(cls) if each.name not in left_out]


def _rounded(spent: TimeSpent) -> TimeSpent:
    return TimeSpent(*(round(getattr(spent, name), _DIGITS) for name in CLASSES))


_EFFECTS = RowEncoder(_decided)


def fingerprint(machine: Machine, effects: Iterable[Any]) -> int:
    encode = _EFFECTS.encoder(machine.effect)
    return crc32(_line([encode(effect) for effect in effects]))


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class _Clock:
    """Times as whole nanoseconds since the time before, where that is exact."""

    def __init__(self) -> None:
        self._last = 0

    def written(self, at: float) -> int | float:
        nanos = round(at * _NANO)
        if nanos / _NANO != at:
            return float(at)
        since, self._last = nanos - self._last, nanos
        return since

    def read(self, cell: Any) -> float:
        if type(cell) is float:
            return cell
        if type(cell) is not int:
            raise TypeError(f"{cell!r:.40} is not a time")
        self._last += cell
        return self._last / _NANO


class Scribe:
    """Values to lines. One scribe per file: the times of a file follow each other."""

    def __init__(self, machine: Machine, hide: Callable[[str], str]) -> None:
        self._machine, self._clock = machine, _Clock()
        self._rows = RowEncoder(all_fields, hide, {TimeSpent: _rounded})
        self._state, self._event = (self._rows.encoder(kind) for kind in (machine.state, machine.event))

    def header(self, release: str, began: float) -> bytes:
        """`began`: the time of day when this file begins."""
        schema = {**self._rows.schema(self._machine.state), **self._rows.schema(self._machine.event)}
        return _line(
            {"machine": self._machine.name, "release": release, "began": round(began, 3), "schema": schema}
        )

    def start(self, state: Any, now: float) -> bytes:
        return _line(["start", self._clock.written(now), self._state(state)])

    def load(self, state: Any, now: float, effects: Iterable[Any]) -> bytes:
        """`state` as it was read from the store."""
        mark = fingerprint(self._machine, effects)
        return _line(["load", self._clock.written(now), self._state(state), mark])

    def hear(self, heartbeats: Mapping[AgentId, float]) -> bytes:
        return _line(
            ["hear", [[a.node, a.incarnation, self._clock.written(at)] for a, at in heartbeats.items()]]
        )

    def do(self, event: Any, now: float, effects: Iterable[Any]) -> bytes:
        mark = fingerprint(self._machine, effects)
        return _line(["do", self._clock.written(now), self._event(event), mark])


@dataclass(frozen=True, slots=True)
class Header:
    machine: str
    release: str
    began: float
    schema: dict[str, tuple[str, ...]]


def read_header(line: bytes) -> Header:
    """Raises `RecordUnreadable`."""
    try:
        found = json.loads(line)
        schema = {str(name): tuple(map(str, columns)) for name, columns in found["schema"].items()}
        began = float(found["began"])
        if not isfinite(began):
            raise ValueError(f"{began} is not a time")
        return Header(str(found["machine"]), str(found["release"]), began, schema)
    except _UNREADABLE as error:
        raise RecordUnreadable(f"its first line is not a header: {error}") from None


def records(machine: Machine, header: Header, lines: Iterable[bytes]) -> Iterator[Record]:
    """Raises `RecordUnreadable` at the first line that cannot be read exactly."""
    clock, decoder = _Clock(), Decoder(header.schema, all_fields)
    try:
        # A class that the file does not describe may be one that its release did not know: then it is not in it.
        for kind in (machine.state, machine.event):
            for cls in classes(kind, all_fields):
                unknown = set(header.schema.get(cls.__name__, ())) - {f.name for f in fields(cls)}
                if unknown:
                    raise ValueError(f"{cls.__name__} has no field {min(unknown)} here")
        state, event = decoder.decoder(machine.state), decoder.decoder(machine.event)
    except _UNREADABLE as error:
        raise RecordUnreadable(str(error)) from None
    for line in lines:
        try:
            match json.loads(line):
                case ["start", now, row]:
                    yield Start(clock.read(now), state(row))
                case ["load", now, row, int(mark)]:
                    yield Load(clock.read(now), state(row), mark)
                case ["hear", list(beats)]:
                    yield Hear({AgentId(str(n), str(i)): clock.read(at) for n, i, at in beats})
                case ["do", now, row, int(mark)]:
                    yield Do(clock.read(now), event(row), mark)
                case other:
                    raise ValueError(f"{str(other)[:40]!r} is not a record")
        except _UNREADABLE as error:
            raise RecordUnreadable(str(error)) from None


# --- what they hide --------------------------------------------------------------------------------
#
# What a journal has in place of a text: a short hash, which does not give the text back.
#
# Equal texts have equal hashes within one journal, because the state machines compare texts. The hash needs a
# random key, which is not in the file. Otherwise a reader could try out which text has it.
#
# Two rules look into a text, and these parts stay. One looks for phrases of torch in an error
# (`diagnosing/diagnosis.py`). The other compares the reason of a drain with a text that contains it
# (`rounds/orders.py`).

_SIZE = 6  # bytes
_KEPT = 4096  # texts whose hash is remembered


class Hiding:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if not text:
            return ""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[text] = self._hidden(text)
        return found

    def _hidden(self, text: str) -> str:
        if text.startswith(DRAINED):
            return DRAINED + self(text.removeprefix(DRAINED))
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_SIZE, key=self._key).hexdigest()
        lower = text.lower()
        return " ".join([f"~{digest}", *(phrase for phrase in OUT_OF_TIME if phrase in lower)])
