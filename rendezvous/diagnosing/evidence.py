"""Whether the reports of all ranks are evidence of a hang, if the user has set no limit. Pure.

Theory of operation
-------------------
A job hangs if a rank waits for another rank, and no rank shows a sign of life for its limit. The limit is the longest
timeout that the script has set for a process group of the rank, and at least ten minutes. A rank that still does
something may be what all others wait for, although no status page shows it: ranks also wait for files, for queues and
in the store. So one such rank is enough to leave the job alone. A rank that waits in a collective may spin, so CPU time
of its own process is not a sign of life then.

Ranks that all wait under the same number of a group, in different collectives, can never go on. That needs no limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing.desync import desync
from rendezvous.values.rank_report import ASK_EARLY_S

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rendezvous.diagnosing.finding import Finding
    from rendezvous.diagnosing.waits import Waits
    from rendezvous.values.rank_report import RankReport


def waiting_ranks(reports: Mapping[int, RankReport]) -> tuple[int, ...]:
    """The ranks that are in a collective, as their page or their flight recorder shows."""
    return tuple(
        rank
        for rank, report in reports.items()
        if report.alive and (report.waits_in or any(call.finished_s is None for call in report.recorded))
    )


def mismatch(waits: Waits, waiting: Collection[int]) -> Finding | None:
    long = [rank for rank in waiting if waits.reports[rank].waits_s >= ASK_EARLY_S]
    return desync(waits, long, all_wait=True)


def by_limit(reports: Mapping[int, RankReport], waiting: Collection[int]) -> dict[int, RankReport]:
    """The reports as if the user had set the limits that the script gives."""
    return {rank: _by_limit(report, rank in waiting) for rank, report in reports.items()}


def _by_limit(report: RankReport, waits: bool) -> RankReport:
    if report.idle_s is None:
        return report
    stalled_s = report.idle_s if waits else report.stalled_s
    return replace(report, stalled_s=stalled_s, limit_s=report.idle_limit_s)


def is_silent(reports: Mapping[int, RankReport], world_size: int) -> bool:
    """Whether no rank has shown a sign of life since its limit. Every agent must have answered."""
    return len(reports) == world_size and all(s.is_overdue for s in reports.values() if s.alive)


def blames_one_of(waiting: Collection[int], found: Finding) -> bool:
    return any(each.rank in waiting for each in found.blamed)
