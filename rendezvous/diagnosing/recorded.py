"""Replace the collectives of the status pages by those of torch's flight recorders, if these have more. Pure.

A page records calls that pass through Python. Calls that C++ starts (the buckets of torch's DDP, functional
collectives) are only in torch's flight recorder. The recorder gives a call the same number on all members of the group,
but not the number that the page gives it, so the two cannot be compared. The calls of a group are taken from the
recorders if all members that have used the group sent their recorder, and at least one recorder has more calls than the
page. Otherwise they are taken from the pages. Sends and receives are always taken from the pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing.waits import POINT_TO_POINT, members_of
from rendezvous.values.rank_report import MAX_GROUPS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.rank_view import GroupView


def with_recorded(reports: Mapping[int, RankReport], world_size: int) -> Mapping[int, RankReport]:
    views: dict[str, list[GroupView]] = {}
    for report in reports.values():
        for group in (*report.recorder, *report.groups):
            views.setdefault(group.name, []).append(group)
    recorded = dict.fromkeys(group.name for report in reports.values() for group in report.recorder)
    members = {name: members_of(views[name], world_size) for name in recorded}
    better = {name: None for name in recorded if _is_better(name, members[name], reports)}
    return {rank: _replaced(report, better) for rank, report in reports.items()} if better else reports


def _is_better(name: str, members: tuple[int, ...], reports: Mapping[int, RankReport]) -> bool:
    recorded = [reports[rank] for rank in members if rank in reports and _is_recorded(reports[rank], name)]
    if not recorded or len(recorded) < len(members):
        return False
    return any(_entered(report.recorder, name) > _entered(report.groups, name) for report in recorded)


def _is_recorded(report: RankReport, name: str) -> bool:
    """Whether the rank's recorder contains the group, or the reports show no use of the group by the rank."""
    if not report.recorder:
        return False
    used = len(report.groups) >= MAX_GROUPS or any(group.name == name for group in report.groups)
    return not used or any(group.name == name for group in report.recorder)


def _entered(groups: tuple[GroupView, ...], name: str) -> int:
    return next((group.entered for group in groups if group.name == name), 0)


def _replaced(report: RankReport, names: Collection[str]) -> RankReport:
    kept = [call for call in report.calls if call.group not in names or call.op in POINT_TO_POINT]
    recorded = [call for call in report.recorded if call.group in names]
    calls = sorted((*kept, *recorded), key=lambda call: -call.entered_s)
    groups = [group for group in report.groups if group.name not in names]
    known = [group for group in report.recorder if group.name in names]
    return replace(report, calls=tuple(calls), groups=(*known, *groups))
