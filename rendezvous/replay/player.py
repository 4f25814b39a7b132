"""Runs a state machine over the records of a journal, and compares its decisions with the recorded ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rendezvous.replay.records import Do, Hear, Load, Machine, Record, RecordUnreadable, Start, fingerprint
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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
