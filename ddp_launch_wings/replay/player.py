"""Runs a state machine over the records of a journal, and compares its decisions with the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from rendezvous.replay.records import (
    Do,
    Hear,
    Load,
    Machine,
    Record,
    RecordUnreadable,
    Start,
    fingerprint,
)
from rendezvous.values.cause_text import counted
from rendezvous.values.events import (
    Accused,
    Assigned,
    CheckpointRequested,
    Ended,
    Refused,
    Stop,
    StoreAt,
    Tell,
)
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import AgentId, Assignment, Cause, Decision, Outcome


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the machine. `event` is None if the state was read from the store."""

    now: float
    event: Any
    before: Any
    after: Any
    effects: tuple[Any, ...]
    same: bool  # as recorded


def play(machine: Machine, records: Iterable[Record]) -> Iterator[Step]:
    """Raises `RecordUnreadable` if the records do not begin with a state, or the machine cannot run over them."""
    state: Any = None
    for record in records:
        try:
            step, state = _one(machine, state, record)
        except RecordUnreadable:
            raise
        except Exception as error:  # values that no machine has written: this file may come from anybody
            raise RecordUnreadable(f"the state machine cannot continue: {error!r}") from error
        if step is not None:
            yield step


def _one(machine: Machine, state: Any, record: Record) -> tuple[Step | None, Any]:
    before, event = state, None
    match record:
        case Start():
            return None, record.state
        case Load() if machine.load is not None:
            before = record.state
            state, effects = machine.load(before, record.now)
        case _ if state is None:
            raise RecordUnreadable("it has no state to begin with")
        case Hear(heartbeats) if machine.hear is not None:
            return None, machine.hear(state, heartbeats)
        case Do(_, event):
            state, effects = machine.step(state, event, record.now)
        case _:
            raise RecordUnreadable(f"the machine of the {machine.name} has no such records")
    same = fingerprint(machine, effects) == record.fingerprint
    return Step(record.now, event, before, state, effects, same), state


# --- A step of a state machine as one line of text: when, what came in, and what was decided --------

_NODES_NAMED = 4
_BRIEF = ("generation", "local_rank", "exit_code", "signum", "kind", "min_nodes", "max_nodes", "node")


def event_words(event: Any) -> str:
    """ "RankFailed node1 generation 2: rank 3, exit-code"; of an event or an action."""
    if event is None:
        return "read from the store"
    words = [type(event).__name__]
    for each in fields(event):
        value = getattr(event, each.name)
        match value:
            case AgentId(node):
                words.append(node)
            case Cause():
                words.append(f"rank {value.rank} {value.failure}")
            case Decision():
                words.append(value.title)
            case Outcome():
                words.append(f"exit code {value.exit_code}")
            case Assignment():
                last = value.rank_offset + value.nproc - 1
                words.append(f"generation {value.generation} ranks {value.rank_offset}-{last}")
            case bool():
                words += [each.name] if value else []
            case int() | Enum() if each.name in _BRIEF:
                words.append(f"{each.name.replace('_', ' ')} {value}")
            case str() if each.name in _BRIEF:
                words.append(value)
            case _ if is_dataclass(value) and each.name == "message":
                words.append(event_words(value))
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of answer, and the nodes that get it."""

    what: str
    nodes: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        more = len(self.nodes) - _NODES_NAMED
        named = ", ".join(self.nodes[:_NODES_NAMED]) + (f" and {more} more" if more > 0 else "")
        return self.what + (f" -> {named}" if named else "") + (f" ({self.reason})" if self.reason else "")


def decided(effects: tuple[Any, ...]) -> tuple[Line, ...]:
    """What these effects of the service decide about the job: no timers, and no messages that only inform."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for effect in effects:
        if isinstance(effect, Tell) and (found := _decision(effect.message)):
            nodes.setdefault(found, []).append(effect.agent.node)
    return tuple(Line(what, tuple(who), reason) for (what, reason), who in nodes.items())


def _decision(message: Any) -> tuple[str, str] | None:
    """What it is, and the reason."""
    match message:
        case Stop(generation, decision):
            return f"stop generation {generation}: {decision.title}", decision.reason
        case Assigned(assignment):
            size = f"{counted(assignment.n_nodes, 'node')}, {counted(assignment.world_size, 'rank')}"
            return f"form generation {assignment.generation}: {size}", ""
        case Ended(outcome):
            how = "has succeeded" if outcome.succeeded else f"has failed, exit code {outcome.exit_code}"
            return f"the job {how}", outcome.reason
        case Refused(reason):
            return "refuse", reason
        case Accused(generation, cause):
            return f"suspect rank {cause.rank} of generation {generation}: {cause.failure}", cause.reason
        case CheckpointRequested(generation, reason):
            return f"ask generation {generation} for a checkpoint", reason
        case StoreAt(generation):
            return f"start generation {generation}", ""
        case _:
            return None


def answers(machine: Machine, effects: tuple[Any, ...]) -> tuple[Line, ...]:
    """All effects but writes and timers."""
    if machine.name != "service":
        return tuple(Line(event_words(effect)) for effect in effects)
    quiet: dict[str, list[str]] = {}
    for effect in effects:
        if isinstance(effect, Tell) and not _decision(effect.message):
            quiet.setdefault(type(effect.message).__name__, []).append(effect.agent.node)
    return (*decided(effects), *(Line(text, tuple(who)) for text, who in quiet.items()))
