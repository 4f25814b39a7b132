"""Journals of simulated jobs, in memory: the lines that the real scribe writes, and what a replay makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_launch_wings.replay.player import Step, play
from rendezvous.replay.records import Hiding, Machine, Record, Scribe, read_header, records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rendezvous.values.types import AgentId


class MemoryJournal:
    """What `rendezvous.replay.journal.Journal` is on disk."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._scribe = Scribe(machine, Hiding(b"key"))
        self.lines: list[bytes] = [self._scribe.header("a release", 0.0)]

    def started(self, state: Any, now: float) -> None:
        self.lines.append(self._scribe.start(state, now))

    def loaded(self, state: Any, now: float, effects: tuple[Any, ...], _after: Any) -> None:
        self.lines.append(self._scribe.load(state, now, effects))

    def heard(self, heartbeats: Mapping[AgentId, float]) -> None:
        self.lines.append(self._scribe.hear(heartbeats))

    def took(self, event: Any, now: float, effects: tuple[Any, ...], _after: Any) -> None:
        self.lines.append(self._scribe.do(event, now, effects))

    @property
    def recorded(self) -> int:
        """The number of steps."""
        return sum(line.startswith((b'["do"', b'["load"')) for line in self.lines)

    def records(self) -> list[Record]:
        return list(records(self.machine, read_header(self.lines[0]), self.lines[1:]))

    def steps(self) -> list[Step]:
        return list(play(self.machine, self.records()))
