"""Adds to each rank's report to the service what its flight recorder shows. Pure.

Torch enables its recorder by default, for Gloo and for NCCL. It also holds the collectives that C++ started. See
rendezvous/diagnosing/diagnosis.py for the evaluation.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from launcher.health.flight_recorder import OF_ONE_SHAPE
from rendezvous.values.rank_report import MAX_CALLS, MAX_GROUPS
from rendezvous.values.rank_view import Collective, GroupView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from launcher.health.flight_recorder import Dump, Entry, Group
    from rendezvous.values.rank_report import RankReport

_SHORT_CHARS = 64
_DTYPES = {  # torch's own names
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def with_recorded(
    reports: tuple[RankReport, ...], dumps: Iterable[Dump], now_ns: int
) -> tuple[RankReport, ...]:
    """Add the dumps to the reports. `now_ns` is wall-clock time, like the times in the recorders."""
    by_rank = {dump.rank: dump for dump in dumps}
    return tuple(
        _with_dump(report, by_rank[report.rank], now_ns) if report.rank in by_rank else report
        for report in reports
    )


def _with_dump(report: RankReport, dump: Dump, now_ns: int) -> RankReport:
    """If there are too many groups, first keep those in which the rank waits, then the most recently used groups."""
    used = [group for group in dump.groups if group.entries]
    used.sort(key=lambda group: (not _pending(group), -group.entries[-1].at_ns))
    calls = [(group, entry) for group in used for entry in group.entries]
    waits = sorted((each for each in calls if not each[1].done), key=_begun)[:MAX_CALLS]
    done = sorted((each for each in calls if each[1].done), key=_begun, reverse=True)
    chosen = sorted([*waits, *done][:MAX_CALLS], key=_begun)
    return replace(
        report,
        recorded=tuple(_call(group, entry, now_ns) for group, entry in chosen),
        recorder=tuple(map(_view, used[:MAX_GROUPS])),
    )


def _begun(calls: tuple[Group, Entry]) -> int:
    return calls[1].at_ns


def _pending(group: Group) -> int:
    return sum(not entry.done for entry in group.entries)


def _view(group: Group) -> GroupView:
    entered = _number(group.entries[-1].sequence)
    return GroupView(
        group.name[:_SHORT_CHARS], group.size, group.spelled, entered, max(0, entered - _pending(group))
    )


def _number(value: int) -> int:
    """Limit the value to the range of the message field, because a rank may write any value."""
    return min(max(0, value), 1 << 62)


def _call(group: Group, entry: Entry, now_ns: int) -> Collective:
    entered_s = _number(now_ns - entry.at_ns) / 1e9
    alike = entry.op in OF_ONE_SHAPE and bool(entry.dtypes)
    dtype = _DTYPES.get(entry.dtypes[0], entry.dtypes[0].lower())[:_SHORT_CHARS] if alike else ""
    return Collective(
        number=_number(entry.sequence),
        group=group.name[:_SHORT_CHARS],
        seq=_number(entry.sequence),
        op=entry.op[:_SHORT_CHARS],
        dtype=dtype,
        numel=_number(sum(map(prod, entry.sizes))) if alike else 0,
        entered_s=entered_s,
        finished_s=entered_s if entry.done else None,
    )
