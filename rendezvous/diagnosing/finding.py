"""The result of a diagnosis: which ranks are blamed, the reason for each, and whether that is certain."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rendezvous.diagnosing import hang_text as words
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import Doubt

if TYPE_CHECKING:
    from rendezvous.values.rank_report import RankReport

MAX_BLAMED = 8  # ranks in one finding
SHORTEST_PATIENCE_S, LONGEST_PATIENCE_S = 0.25, 15.0
TIMED_OUT_EXIT_CODE = 124  # the exit code of timeout(1)


class Kind(StrEnum):
    ABSENT = "absent"
    DESYNC = "desync"
    DEADLOCK = "deadlock"
    APART = "apart"
    ALIKE = "alike"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class BlamedRank:
    rank: int
    reason: str
    stalled: bool = False  # it runs without progress: its stack may show that it waits for other ranks


def blame(report: RankReport, more: str) -> BlamedRank:
    """Blame a rank. The reason is its state, followed by `more`."""
    is_stalled = report.alive and report.known and not report.is_stopped
    return BlamedRank(report.rank, f"{words.doing(report)}{more}", is_stalled)


@dataclass(frozen=True, slots=True)
class Finding:
    """The blamed ranks, whose stacks the agents collect. If not `certain`, some or all of them may not be the cause."""

    kind: Kind
    blamed: tuple[BlamedRank, ...]
    certain: bool
    evidence: tuple[str, ...] = ()
    suspects: tuple[int, ...] = ()  # if not `certain`: all ranks that may be the cause

    def doubt_about(self, blamed: BlamedRank) -> Doubt | None:
        if self.certain:
            return None
        if self.kind is Kind.ALIKE:
            return Doubt.NO_RANK
        alone = self.suspects == (blamed.rank,)
        return Doubt.MAY_WAIT if alone and blamed.stalled else Doubt.CULPRIT


@dataclass(frozen=True, slots=True)
class Patience:
    """So far the stall is expected, for example during a checkpoint: examine the ranks again after this time."""

    after_s: float
