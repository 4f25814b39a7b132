"""What a health source says about this node."""

from __future__ import annotations

from enum import IntEnum

from rendezvous.values.late_dataclass import dataclass

_LINE_CHARS = 200


def line(text: str) -> str:
    """One printable line of limited length: sources are outside of our control, and people read this on terminals."""
    words = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return words if len(words) <= _LINE_CHARS else words[: _LINE_CHARS - 1] + "…"


class Severity(IntEnum):
    NOTE = 0
    WARNING = 1
    UNFIT = 2  # ranks would fail here, or would delay all others


@dataclass(frozen=True, slots=True)
class Finding:
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
    findings: tuple[Finding, ...] = ()
    problem: str = ""
    has_answered: bool = False


class NotUnderstood(ValueError):
    """The answer of a source has no format that this package knows."""
