"""What is found when ranks stand still, or have failed together: who is charged with what, and how surely."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CHARGED = 8  # ranks in one finding
TIMED_OUT_EXIT_CODE = 124  # as timeout(1) has it


class Kind(StrEnum):
    ABSENT = "absent"
    DESYNC = "desync"
    DEADLOCK = "deadlock"
    APART = "apart"
    ALIKE = "alike"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Charge:
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """`charges`: whose stacks are worth a look; not `certain`: of whom some, or all, may be innocent."""

    kind: Kind
    charges: tuple[Charge, ...]
    certain: bool
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Patience:
    """Somebody stands still, and with good reason: look again."""

    after_s: float
