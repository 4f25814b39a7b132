"""Replace the collectives of the pages by those of torch's flight recorders, where these know more. Pure.

A page records calls that pass through Python. Calls that C++ starts by itself (the buckets of torch's DDP, functional
collectives) appear only in torch's flight recorder, which numbers all calls of a group alike on all its members. The
two numberings do not mix. So a group comes from the recorders if those of all members that have used it reported, and
any of them knows more calls than the page. Otherwise it comes from the pages. Sends and receives come from the pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing.waits import POINT_TO_POINT, members_of
from rendezvous.values.rank_report import GROUPS_TOLD

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
    heard = [reports[rank] for rank in members if rank in reports and _is_told(reports[rank], name)]
    if not heard or len(heard) < len(members):
        return False
    return any(_entered(report.recorder, name) > _entered(report.groups, name) for report in heard)


def _is_told(report: RankReport, name: str) -> bool:
    """Whether the rank's recorder reports the group, or the rank has not used the group as far as is known."""
    if not report.recorder:
        return False
    used = len(report.groups) >= GROUPS_TOLD or any(group.name == name for group in report.groups)
    return not used or any(group.name == name for group in report.recorder)


def _entered(groups: tuple[GroupView, ...], name: str) -> int:
    return next((group.entered for group in groups if group.name == name), 0)


def _replaced(report: RankReport, names: Collection[str]) -> RankReport:
    kept = [call for call in report.calls if call.group not in names or call.op in POINT_TO_POINT]
    told = [call for call in report.recorded if call.group in names]
    calls = sorted((*kept, *told), key=lambda call: -call.entered_s)
    groups = [group for group in report.groups if group.name not in names]
    known = [group for group in report.recorder if group.name in names]
    return replace(report, calls=tuple(calls), groups=(*known, *groups))
