"""The result of a diagnosis of a stall or a joint failure: which ranks are charged, with what, and how certainly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rendezvous.diagnosing import hang_text as words
from rendezvous.values.types import Doubt

if TYPE_CHECKING:
    from rendezvous.values.rank_report import RankReport

CHARGED = 8  # ranks in one finding
TIMED_OUT_EXIT_CODE = 124  # the exit code of timeout(1)


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
    stalled: bool = False  # the rank runs, and makes no progress: its stack may show that it waits for others


def charge(report: RankReport, more: str) -> Charge:
    """Charge a rank with what it does. `more` follows in the reason."""
    is_stalled = report.alive and report.known and not report.is_stopped
    return Charge(report.rank, f"{words.doing(report)}{more}", is_stalled)


@dataclass(frozen=True, slots=True)
class Finding:
    """The charged ranks, whose stacks are worth a look. If not `certain`, some or all of them may be innocent."""

    kind: Kind
    charges: tuple[Charge, ...]
    certain: bool
    evidence: tuple[str, ...] = ()
    suspects: tuple[int, ...] = ()  # all ranks that may be the culprit, if not `certain`

    def doubt_about(self, charge: Charge) -> Doubt | None:
        if self.certain:
            return None
        if self.kind is Kind.ALIKE:
            return Doubt.NO_RANK
        alone = self.suspects == (charge.rank,)
        return Doubt.MAY_WAIT if alone and charge.stalled else Doubt.CULPRIT


@dataclass(frozen=True, slots=True)
class Patience:
    """The stall has a good reason so far: examine the ranks again after this time."""

    after_s: float
