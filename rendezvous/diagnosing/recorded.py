"""Collectives that only torch's flight recorders have seen, in place of what the pages say. Pure.

A page notes what passes through Python. What C++ begins by itself (the buckets of torch's DDP, functional collectives)
is known to torch's flight recorder alone, which numbers everything in a group as all its members do. The two ways to
number do not mix. So a group is told by the recorders where those of all its members that have used it were heard, and
any of them knows of more than the page; else by the pages. Sends and receives stay as the pages have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing.waits import POINT_TO_POINT, members_of
from rendezvous.values.rank_report import GROUPS_TOLD

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rendezvous.values.rank_report import Sight
    from rendezvous.values.rank_view import GroupView


def with_recorded(sights: Mapping[int, Sight], world_size: int) -> Mapping[int, Sight]:
    views: dict[str, list[GroupView]] = {}
    for sight in sights.values():
        for group in (*sight.recorder, *sight.groups):
            views.setdefault(group.name, []).append(group)
    recorded = dict.fromkeys(group.name for sight in sights.values() for group in sight.recorder)
    members = {name: members_of(views[name], world_size) for name in recorded}
    better = {name: None for name in recorded if _is_better(name, members[name], sights)}
    return {rank: _replaced(sight, better) for rank, sight in sights.items()} if better else sights


def _is_better(name: str, members: tuple[int, ...], sights: Mapping[int, Sight]) -> bool:
    heard = [sights[rank] for rank in members if rank in sights and _is_told(sights[rank], name)]
    if not heard or len(heard) < len(members):
        return False
    return any(_entered(sight.recorder, name) > _entered(sight.groups, name) for sight in heard)


def _is_told(sight: Sight, name: str) -> bool:
    """By its recorder; or it has not used the group, as far as anybody can say."""
    if not sight.recorder:
        return False
    used = len(sight.groups) >= GROUPS_TOLD or any(group.name == name for group in sight.groups)
    return not used or any(group.name == name for group in sight.recorder)


def _entered(groups: tuple[GroupView, ...], name: str) -> int:
    return next((group.entered for group in groups if group.name == name), 0)


def _replaced(sight: Sight, names: Collection[str]) -> Sight:
    kept = [call for call in sight.calls if call.group not in names or call.op in POINT_TO_POINT]
    told = [call for call in sight.recorded if call.group in names]
    calls = sorted((*kept, *told), key=lambda call: -call.entered_s)
    groups = [group for group in sight.groups if group.name not in names]
    known = [group for group in sight.recorder if group.name in names]
    return replace(sight, calls=tuple(calls), groups=(*known, *groups))
