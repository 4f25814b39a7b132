"""The wait-for graph of the ranks, built from their reports. Pure.

Theory of operation
-------------------
All members of a group number its collectives in the same way. A rank that has entered collective n and not left it
waits for the members that have not reached n: these are the *missing* ranks of the call. The graph has an edge from
each waiting rank to the missing ranks of its calls. A rank that others wait for, and that does not wait itself, is a
*root*: the others make no progress because of it. If no path leads from a rank to a root, the rank waits in a cycle. If
a call has no missing ranks, all of its ranks have entered it, and wait for the network or a device.

Each call is examined once, whatever the number of ranks that wait in it, so the work for a world of thousands of ranks
is linear. Some ranks have no report: their agent did not answer, or they have never written their status page. Such a
rank counts as missing only if no other rank of the call is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import MAX_GROUPS, Collective, GroupView, RankReport

MEMBERS_READ = 1 << 20  # of one group; a longer list is ignored
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")  # a rank may finish before all have entered
POINT_TO_POINT = {"send": "recv", "isend": "recv", "recv": "send", "irecv": "send"}


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that at least one rank waits in."""

    group: str
    seq: int
    between: tuple[str, int, int] | None = None  # of a send or receive: operation, waiting rank, awaited rank


@dataclass(frozen=True, slots=True)
class Waits:
    reports: Mapping[int, RankReport]
    all_reported: bool  # every rank of the world has reported
    members: Mapping[str, tuple[int, ...]]  # by group
    calls: Mapping[int, tuple[Call, ...]]  # by rank: the calls in which it waits, oldest first
    missing: Mapping[Call, tuple[int, ...]]
    described: Mapping[Call, Collective]  # the call as the first waiting rank reports it
    inside: Mapping[Call, tuple[int, ...]] = field(default_factory=dict)  # the ranks that wait in it

    def next_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that this rank waits for."""
        return tuple(dict.fromkeys(m for call in self.calls.get(rank, ()) for m in self.missing[call]))

    def blocked(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.calls if any(self.missing[call] for call in self.calls[rank]))

    def roots(self) -> tuple[int, ...]:
        """Ranks that others wait for, and that do not wait themselves."""
        blocked = dict.fromkeys(self.blocked())
        wanted = dict.fromkeys(m for call in self.missing for m in self.missing[call])
        return tuple(sorted(rank for rank in wanted if rank not in blocked))

    def unexplained(self) -> tuple[int, ...]:
        """Blocked ranks from which no path leads to a root: they wait for each other."""
        waiters: dict[int, list[int]] = {}  # missing rank -> ranks that wait for it
        for call, missing in self.missing.items():
            for rank in missing:
                waiters.setdefault(rank, []).extend(self.inside[call])
        explained = dict.fromkeys(self.roots())
        ahead = list(explained)
        while ahead:
            for rank in waiters.pop(ahead.pop(), ()):
                if rank not in explained:
                    explained[rank] = None
                    ahead.append(rank)
        return tuple(rank for rank in self.blocked() if rank not in explained)

    def cycle(self, start: int) -> tuple[int, ...]:
        """The cycle that the path from an unexplained rank ends in: each rank waits for the next."""
        among = dict.fromkeys(self.unexplained())
        path: dict[int, None] = {}
        rank = start
        while rank not in path:
            path[rank] = None
            rank = next(m for m in self.next_of(rank) if m in among)
        ranks = list(path)
        return tuple(ranks[ranks.index(rank) :])


def waits_of(reports: Mapping[int, RankReport], world_size: int) -> Waits:
    members = {name: _members(name, reports, world_size) for name in _groups(reports)}
    entered = {name: _entered(name, members[name], reports) for name in members}
    calls: dict[int, tuple[Call, ...]] = {}
    missing: dict[Call, tuple[int, ...]] = {}
    described: dict[Call, Collective] = {}
    inside: dict[Call, dict[int, None]] = {}
    for rank, report in reports.items():
        here = []
        for entered_call in report.waits_in:
            call = _call(rank, entered_call)
            if call not in missing:
                missing[call] = _missing(call, entered_call, reports, members, entered)
                described[call] = entered_call
            here.append(call)
            inside.setdefault(call, {})[rank] = None
        if here:
            calls[rank] = tuple(here)
    return Waits(
        reports,
        len(reports) == world_size,
        members,
        calls,
        missing,
        described,
        {call: tuple(ranks) for call, ranks in inside.items()},
    )


def _groups(reports: Mapping[int, RankReport]) -> Iterable[str]:
    return dict.fromkeys(call.group for report in reports.values() for call in report.waits_in)


def _call(rank: int, entered: Collective) -> Call:
    if entered.op in POINT_TO_POINT and entered.peer >= 0:
        return Call(entered.group, entered.seq, (entered.op, rank, entered.peer))
    return Call(entered.group, entered.seq)


def _missing(
    call: Call,
    awaited: Collective,
    reports: Mapping[int, RankReport],
    members: Mapping[str, tuple[int, ...]],
    entered: Mapping[str, Mapping[int, int | None]],
) -> tuple[int, ...]:
    if call.between is not None:
        op, rank, peer = call.between
        return () if _answers(reports.get(peer), POINT_TO_POINT[op], rank, call.seq) else (peer,)
    last = entered[call.group]
    if awaited.op == "broadcast" and awaited.peer in last and _is_behind(last[awaited.peer], call.seq):
        return (awaited.peer,)  # the others may have finished already, or are not needed
    behind = [rank for rank in members[call.group] if _is_behind(last.get(rank), call.seq)]
    if (
        behind
        and awaited.op not in _ONE_SIDED
        and any(_has_finished(reports, m, call) for m in members[call.group])
    ):
        return ()  # no rank can finish before all enter: these ranks count differently
    known = tuple(rank for rank in behind if rank in reports and reports[rank].known)
    return known or tuple(rank for rank in behind if rank not in reports or not reports[rank].known)


def _is_behind(entered: int | None, seq: int) -> bool:
    return entered is not None and entered < seq


def _has_finished(reports: Mapping[int, RankReport], rank: int, call: Call) -> bool:
    report = reports.get(rank)
    if report is None:
        return False
    return any(c.group == call.group and c.seq == call.seq and c.finished_s is not None for c in report.calls)


def _answers(peer: RankReport | None, op: str, rank: int, seq: int) -> bool:
    """Whether the peer has entered its call. Sender and receiver number their messages per direction."""
    if peer is None:
        return False
    return any(c.op.removeprefix("i") == op and c.peer == rank and c.seq >= seq for c in peer.calls)


def _entered(name: str, members: tuple[int, ...], reports: Mapping[int, RankReport]) -> dict[int, int | None]:
    """The last collective that each member has entered; None: unknown."""
    return {rank: _entered_by(reports.get(rank), name) for rank in members}


def _entered_by(report: RankReport | None, name: str) -> int | None:
    if report is None:
        return 0
    found = next((group.entered for group in report.groups if group.name == name), None)
    if found is None:  # not used yet, or left out of a full report
        return 0 if len(report.groups) < MAX_GROUPS else None
    return found


def _members(name: str, reports: Mapping[int, RankReport], world_size: int) -> tuple[int, ...]:
    """The members of a group. If no report lists them: the ranks that have used the group."""
    views = {r: group for r, report in reports.items() for group in report.groups if group.name == name}
    return members_of(views.values(), world_size) or tuple(views)


def members_of(views: Iterable[GroupView], world_size: int) -> tuple[int, ...]:
    """The members as one of these views lists them; () if none does."""
    for group in views:
        if group.size == world_size:
            return tuple(range(world_size))
        if group.members and (listed := ranks_in(group.members)):
            return listed
    return ()


def ranks_in(text: str) -> tuple[int, ...]:
    """Parse "0-3", "0-6/2", "0,3,5" and mixtures of them. Any other text gives ()."""
    found: list[int] = []
    for part in text.split(","):
        span, _, stride = part.partition("/")
        first, _, last = span.partition("-")
        if not all(word.isdecimal() for word in (first, last or "0", stride or "1")):
            return ()
        ranks = range(int(first), int(last or first) + 1, max(1, int(stride or 1)))
        if len(ranks) + len(found) > MEMBERS_READ:
            return ()
        found.extend(ranks)
    return tuple(found)
