"""What health sources say about this node (`--health-source`). A wing asks them: node-problem-detector, DCGM, a script.

A source is asked before the node joins, and every 30 s while ranks run. An unfit node does not join. A source that
fails never stops a job: the user gets one warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

from rendezvous.values.late_dataclass import dataclass


class Severity(IntEnum):
    NOTE = 0
    WARNING = 1
    UNFIT = 2  # ranks would fail here, or would delay all others


@dataclass(frozen=True, slots=True)
class HealthFinding:
    severity: Severity
    name: str  # of the condition, taint, label or metric
    text: str
    of: str = ""  # the part of the node, if one name can have several findings

    @property
    def key(self) -> str:
        """Equal for two answers that report the same problem, also if the details have changed."""
        return f"{self.name} {self.of}"

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


@dataclass(frozen=True, slots=True)
class Opinion:
    """The latest answer of one source. If it failed: `problem`, and the findings of the last answer."""

    place: str
    findings: tuple[HealthFinding, ...] = ()
    problem: str = ""
    has_answered: bool = False


class SourceFailed(Exception):
    """The source did not answer, or its answer was not understood. The text is one printable line."""


class HealthSource(Protocol):
    """The door `ddp_launch.health_source`: `(place, ignored) -> HealthSource`."""

    @property
    def place(self) -> str:
        """What --health-source names."""

    def ask(self, environ: Mapping[str, str]) -> tuple[HealthFinding, ...]:
        """Raise SourceFailed, after some seconds at most."""
