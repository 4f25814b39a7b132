"""Find the rank that stalls a job, from the reports of all ranks together. Pure.

Theory of operation
-------------------
By default, a finding needs evidence: a section below decides that there is enough of it. If the user has set limits, it
needs an overdue rank: a rank that has stalled for longer than the limit of its current activity. The reports come from
the ranks' status pages, in shared memory. The checks run in this order:

0. If torch's flight recorders contain more collectives than the status pages, the service uses the recorders instead
   (a section below). Only they record the all-reduce calls that torch's own DDP starts in C++.
1. desync: ranks are in the collective with the same number of a group, but the operation, the number of elements or
   their type differs. The finding names the minority. If there is no majority, it names all these ranks, and is not
   certain.
2. absent: other ranks wait for a rank that does not wait itself (see waits.py). This rank is blamed, and its own report
   gives the reason. If it is not overdue itself (a checkpoint, an evaluation, a long step), there is no problem yet:
   `Patience` contains the time until the next check. A collective may finish on some ranks and block others. Then a
   rank whose process is stopped in that collective is blamed, not the other ranks that wait in it. A rank that has
   ended without an error is never blamed.
3. deadlock: ranks wait for each other in a cycle.
4. apart: the collectives do not show the reason, because they are not recorded, or because all ranks have entered them.
   But one rank differs from the others: it is stopped by a signal, exits, is behind all others, or computes while the
   others sleep.
5. alike: the ranks do not differ. Then the reason is the network or a device, or all ranks have the same problem. No
   rank is blamed.

A finding is `certain` only if the reports permit no other explanation. A rank that sleeps in its forward or backward
pass may wait for others in a collective that is not recorded. So blaming it is certain only if its flight recorder
shows no such call, or if the ranks that wait outnumber the ranks that are waited for. If a debugger has stopped a rank,
or every rank of a world is stopped, there is no finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from rendezvous.diagnosing import hang_text as words
from rendezvous.diagnosing.waits import POINT_TO_POINT, Waits, members_of, waits_of
from rendezvous.values.cause_text import OUT_OF_TIME
from rendezvous.values.contracts import NO_PROGRESS
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import ASK_EARLY_S, MAX_GROUPS, Collective, GroupView, RankPhase, RankReport
from rendezvous.values.types import Cause, Doubt, FailureClass, Placement, World

# --- what a diagnosis finds -------------------------------------------------------------------------

MAX_BLAMED = 8  # ranks in one finding
SHORTEST_PATIENCE_S, LONGEST_PATIENCE_S = 0.25, 15.0


class FindingKind(StrEnum):
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

    kind: FindingKind
    blamed: tuple[BlamedRank, ...]
    certain: bool
    evidence: tuple[str, ...] = ()
    suspects: tuple[int, ...] = ()  # if not `certain`: all ranks that may be the cause

    def doubt_about(self, blamed: BlamedRank) -> Doubt | None:
        if self.certain:
            return None
        if self.kind is FindingKind.ALIKE:
            return Doubt.NO_RANK
        alone = self.suspects == (blamed.rank,)
        return Doubt.MAY_WAIT if alone and blamed.stalled else Doubt.CULPRIT


@dataclass(frozen=True, slots=True)
class Patience:
    """So far the stall is expected, for example during a checkpoint: examine the ranks again after this time."""

    after_s: float


# --- the checks, in their order ---------------------------------------------------------------------

_EVIDENCE = 24  # lines


def diagnose(reports: Mapping[int, RankReport], world_size: int) -> Finding | Patience | None:
    """Diagnose a stall. `reports` does not contain the ranks of agents that have not answered."""
    reports = with_recorded(reports, world_size)
    running = [report for report in reports.values() if report.alive]
    if any(report.process == "t" for report in running):
        return None
    if all(report.is_stopped for report in running) and len(running) > 1:
        return None  # an operator has stopped the job, and can continue it
    overdue = [s.rank for s in running if s.known and s.is_overdue]
    found = _by_limit(reports, world_size, overdue) if overdue else _by_evidence(reports, world_size)
    if not isinstance(found, Finding):
        return found
    suspects = (
        () if found.certain or found.kind is FindingKind.ALIKE else tuple(each.rank for each in found.blamed)
    )
    return replace(
        found, blamed=_with_the_others(found), suspects=suspects, evidence=_evidence(reports, found)
    )


def _by_limit(
    reports: Mapping[int, RankReport], world_size: int, overdue: Sequence[int]
) -> Finding | Patience:
    waits = waits_of(reports, world_size)
    return (
        desync(waits, overdue)
        or _absent(waits, overdue)
        or _deadlock(waits)
        or _apart(reports, waits, overdue)
        or _alike(reports, waits, overdue)
    )


def _by_evidence(reports: Mapping[int, RankReport], world_size: int) -> Finding | None:
    waiting = waiting_ranks(reports)
    if not waiting or all(report.idle_s is None for report in reports.values()):
        return None
    different = mismatch(waits_of(reports, world_size), waiting)
    if different is not None:
        return different
    reports = by_limit(reports, waiting)
    if not is_silent(reports, world_size):
        return None
    waits = waits_of(reports, world_size)
    found = _absent(waits, waiting) or _deadlock(waits) or _apart(reports, waits, waiting)
    if not isinstance(found, Finding) or (found.kind is FindingKind.APART and blames_one_of(waiting, found)):
        return None
    return found


def _with_the_others(found: Finding) -> tuple[BlamedRank, ...]:
    """If the finding is certain, the reason of each blamed rank names the other blamed ranks too."""
    blamed = found.blamed[:MAX_BLAMED]
    if not found.certain:
        return blamed
    ranks = [each.rank for each in found.blamed]

    def reason(one: BlamedRank) -> str:
        others = [rank for rank in ranks if rank != one.rank]
        return f"{one.reason}; the same for {words.ranks(others)}" if others else one.reason

    return tuple(replace(each, reason=reason(each)) for each in blamed)


def _evidence(reports: Mapping[int, RankReport], found: Finding) -> tuple[str, ...]:
    """One line per rank: the blamed ranks first, then the others in order, up to a limit."""
    blamed = [each.rank for each in found.blamed]
    others = [rank for rank in sorted(reports) if rank not in blamed]
    lines = [words.line(reports[rank]) for rank in (*blamed, *others)[:_EVIDENCE] if rank in reports]
    left = len(reports) - len(lines)
    return (*lines, *((f"... and {left} more ranks",) if left > 0 else ()))


# --- 1. desync: different collectives under the same number of a group --------------------------------
#
# The finding names the ranks of the minority. If there is no majority, it names the ranks of all groups, and is not
# certain.

UNKNOWN = "?"  # the type of tensors of the script's own classes, which ranks do not look at
_Signature = tuple[str, str, int, int]


def _signature(call: Collective) -> _Signature:
    """The properties of a call that must be equal on all ranks. Status pages contain only sizes that must be equal."""
    return (call.op, call.dtype, call.numel, call.peer if call.op == "broadcast" else -1)


def desync(waits: Waits, ranks: Collection[int], *, all_wait: bool = False) -> Finding | None:
    """`all_wait`: only if all members of the group are among `ranks` and wait in these calls."""
    pending = {call.group for rank in ranks for call in waits.calls.get(rank, ()) if call.between is None}
    entered: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, report in waits.reports.items():
        for call in report.calls:
            if call.group in pending and call.op not in POINT_TO_POINT and call.dtype != UNKNOWN:
                entered.setdefault((call.group, call.seq), {})[rank] = call
    for where in sorted(entered):
        by_rank = entered[where]
        kinds = Counter(_signature(call) for call in by_rank.values())
        waiting = [rank for rank, call in by_rank.items() if call.finished_s is None]
        if all_wait and not all(r in waiting and r in ranks for r in waits.members[where[0]]):
            continue
        if len(kinds) > 1 and waiting:
            return _desync_finding(by_rank, kinds, len(waits.members[where[0]]))
    return None


def _desync_finding(by_rank: Mapping[int, Collective], kinds: Counter[_Signature], n_members: int) -> Finding:
    ((most, n_most),) = kinds.most_common(1)
    majority = [rank for rank, call in by_rank.items() if _signature(call) == most]
    minority = [rank for rank in by_rank if rank not in majority]
    if n_most * 2 <= max(len(by_rank), n_members):
        groups = "; ".join(
            f"{words.ranks([r for r, c in by_rank.items() if _signature(c) == kind])} entered "
            + _first_of_kind(by_rank, kinds, kind)
            for kind in kinds
        )
        reason = f"the ranks called different collectives: {groups}"
        everyone = tuple(BlamedRank(rank, reason) for rank in sorted(by_rank))
        return Finding(FindingKind.DESYNC, everyone, certain=False)
    rest = f"while {words.ranks(majority)} entered {_first_of_kind(by_rank, kinds, most)}"
    blamed = tuple(
        BlamedRank(rank, f"entered {_described_call(by_rank[rank], kinds)}, {rest}")
        for rank in sorted(minority)
    )
    return Finding(FindingKind.DESYNC, blamed, certain=True)


def _first_of_kind(by_rank: Mapping[int, Collective], kinds: Counter[_Signature], kind: _Signature) -> str:
    return next(_described_call(call, kinds) for call in by_rank.values() if _signature(call) == kind)


def _described_call(call: Collective, kinds: Counter[_Signature]) -> str:
    """Describe a call. Name the root of a broadcast if the roots differ."""
    roots = {kind[3] for kind in kinds if kind[0] == "broadcast"}
    differs = call.op == "broadcast" and len(roots) > 1
    return f"{words.call(call)} from rank {call.peer}" if differs else words.call(call)


# --- 2. absent -----------------------------------------------------------------------------------------


def _absent(waits: Waits, overdue: Sequence[int]) -> Finding | Patience | None:
    roots = waits.roots()
    ended = [rank for rank in roots if rank in waits.reports and not waits.reports[rank].alive]
    roots = tuple(rank for rank in roots if rank not in ended)
    seen = [waits.reports[rank] for rank in roots if rank in waits.reports]
    due = [report for report in seen if report.is_overdue]
    waiting = waits.blocked()
    if not due:
        if not any(rank in waiting for rank in overdue):
            return None
        if not roots:
            return (
                _ended(waits.reports[min(waiting)], ended, words.waiting_for(waits, ended[0]))
                if ended
                else None
            )
        return _patience(seen) if seen else _no_answer(waits, roots)
    beside = _waiting_beside(waits, due)
    due = [report for report in due if report.rank not in beside]
    outnumbered = len(waiting) + len(beside) > len(roots) - len(beside)
    certain = all(explains_itself(s) for s in due) or (outnumbered and all(s.known for s in due))
    if not certain and len(waiting) < len(
        due
    ):  # these ranks may have entered a call that the others never enter
        return _in_different_calls(waits, waiting, due)
    blamed = tuple(blame(s, f"; {words.waiting_for(waits, s.rank)}") for s in due)
    return Finding(FindingKind.ABSENT, blamed, certain)


def _waiting_beside(waits: Waits, due: Sequence[RankReport]) -> dict[int, RankReport]:
    """Overdue roots that only wait in a collective which all ranks have entered: another overdue root is the cause.

    Empty if no other overdue root is the cause: all of them are in such a collective, and none of them is stopped.
    """
    inside = [s for s in due if s.phase is RankPhase.COMMUNICATE and s.rank in waits.calls]
    beside = {s.rank: s for s in inside if s.alive and s.process not in _STUCK}
    return beside if len(beside) < len(due) else {}


def _patience(reports: Sequence[RankReport]) -> Patience:
    """The time until the first of these ranks is overdue."""
    lefts = [s.limit_s - s.stalled_s for s in reports if s.limit_s is not None]
    return Patience(max(SHORTEST_PATIENCE_S, min([*lefts, LONGEST_PATIENCE_S])))


_STUCK = ("T", "D", "F")
_WITHOUT_COLLECTIVES = (
    RankPhase.DATA,
    RankPhase.CHECKPOINT,
    RankPhase.EVALUATION,
    RankPhase.SECTION,
    RankPhase.OPTIMIZER,
    RankPhase.EXITING,
)


def explains_itself(report: RankReport) -> bool:
    """Whether the report shows that the rank does not wait for others in a call that is not recorded."""
    if not report.alive or report.process in _STUCK:
        return True
    if report.recorder and not report.waits_in and report.phase in (RankPhase.FORWARD, RankPhase.BACKWARD):
        return True
    return report.known and (
        report.phase in _WITHOUT_COLLECTIVES or (report.busy and report.phase is not RankPhase.COMMUNICATE)
    )


def _no_answer(waits: Waits, roots: Sequence[int]) -> Finding:
    """The finding if the only missing ranks are those whose agents did not answer."""
    blamed = [
        BlamedRank(rank, f"its agent did not report its state; {words.waiting_for(waits, rank)}")
        for rank in roots[:MAX_BLAMED]
    ]
    return Finding(FindingKind.ABSENT, tuple(blamed), certain=False)


def _ended(waiting: RankReport, ended: Sequence[int], more: str) -> Finding:
    """No rank is the cause: ranks wait for ranks that have ended without an error."""
    have = "has" if len(ended) == 1 else "have"
    reason = f"{words.ranks(ended)} {have} exited without an error; {more}"
    return Finding(FindingKind.ALIKE, (BlamedRank(waiting.rank, reason),), certain=False)


def _in_different_calls(waits: Waits, waiting: Sequence[int], others: Sequence[RankReport]) -> Finding:
    several = len(others) > 1
    names = words.ranks([s.rank for s in others])
    they_are = f"{'they are' if several else 'it is'} {words.place(others[0], several)}"
    blamed = tuple(
        BlamedRank(
            rank,
            f"waits in {words.call(waits.described[waits.calls[rank][0]])}, which {names} never entered; {they_are}",
        )
        for rank in waiting
    )
    return Finding(FindingKind.DESYNC, blamed, certain=False)


# --- 3. deadlock ---------------------------------------------------------------------------------------


def _deadlock(waits: Waits) -> Finding | None:
    stuck = waits.unexplained()
    if not stuck:
        return None
    circle = waits.cycle(stuck[0])
    first_calls = {rank: next(c for c in waits.calls[rank] if waits.missing[c]) for rank in stuck}
    sizes = Counter(first_calls.values())
    ((common, n_common),) = sizes.most_common(1)
    cycle = "; ".join(
        f"rank {rank} in {words.call(waits.described[first_calls[rank]], False)}"
        for rank in circle[:MAX_BLAMED]
    )
    reason = f"deadlock: {words.ranks(circle)} wait for each other in a cycle: {cycle}"
    if n_common * 2 > len(stuck) and n_common < len(stuck):
        minority = [rank for rank in stuck if first_calls[rank] != common]
        where = words.call(waits.described[common], False)
        reason += f"; {n_common} of the {len(stuck)} waiting ranks are in {where}"
        return Finding(
            FindingKind.DEADLOCK, tuple(BlamedRank(rank, reason) for rank in minority), certain=True
        )
    return Finding(FindingKind.DEADLOCK, tuple(BlamedRank(rank, reason) for rank in circle), certain=False)


# --- 4. apart ------------------------------------------------------------------------------------------

# The order within a step. Any other phase counts as before the first; exiting ranks are not compared.
_ORDER = {
    RankPhase.DATA: 1,
    RankPhase.FORWARD: 2,
    RankPhase.BACKWARD: 3,
    RankPhase.COMMUNICATE: 3,
    RankPhase.OPTIMIZER: 4,
}


def _apart(
    reports: Mapping[int, RankReport], waits: Waits, overdue: Sequence[int]
) -> Finding | Patience | None:
    everyone = list(reports.values())
    for group, certain in _apart_groups(everyone, [reports[rank] for rank in overdue]):
        if not group or len(group) * 2 > len(everyone):
            continue
        due = [report for report in group if report.is_overdue]
        if not due:
            return _patience(group)
        others = _others_in_words([report for report in everyone if report not in group], waits)
        blamed = tuple(blame(s, others) for s in due)
        return Finding(FindingKind.APART, blamed, certain and waits.all_reported and len(due) == len(group))
    return None


def _apart_groups(
    everyone: Sequence[RankReport], overdue: Sequence[RankReport]
) -> list[tuple[list[RankReport], bool]]:
    """Groups of ranks that differ from all others, the strongest difference first. The flag: it proves the cause."""
    known = [s for s in everyone if s.known and s.alive and s.phase is not RankPhase.EXITING]
    behind = _furthest_behind(known)
    alive = [s for s in everyone if s.alive]
    groups = [([s for s in everyone if s.is_stopped], True)]
    if len(alive) == 1 and explains_itself(alive[0]):
        groups.append((alive, True))
    if not any(explains_itself(s) for s in overdue):
        groups.append(([s for s in everyone if s.alive and s.phase is RankPhase.EXITING], False))
    if len(behind) < len(known):
        groups.append((behind, all(explains_itself(s) for s in behind)))
    groups.append(([s for s in everyone if s.alive and s.process == "D"], False))
    groups.append(([s for s in known if s.busy], False))
    return groups


def _furthest_behind(known: Sequence[RankReport]) -> list[RankReport]:
    if not known:
        return []
    least = min(_position(report) for report in known)
    return [report for report in known if _position(report) == least]


def _position(report: RankReport) -> tuple[int, int]:
    return (report.step, _ORDER.get(report.phase, 0))


def _others_in_words(others: Sequence[RankReport], waits: Waits) -> str:
    if not others:
        return ""
    numbers = [report.rank for report in others]
    inside = next((waits.calls[rank][0] for rank in numbers if rank in waits.calls), None)
    if inside is not None and inside.between is None and not waits.missing[inside]:
        return (
            f"; {words.wait(numbers)} in {words.call(waits.described[inside])}, which all ranks have entered"
        )
    places = dict.fromkeys(words.place(report, len(others) > 1) for report in others)
    verb = "is" if len(numbers) == 1 else "are"
    steps = sorted({report.step for report in others})
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
    return f"; {words.ranks(numbers)} {verb} {' or '.join(places)} (after {at})"


# --- 5. alike ------------------------------------------------------------------------------------------


def _alike(reports: Mapping[int, RankReport], waits: Waits, overdue: Sequence[int]) -> Finding:
    first = reports[min(overdue)]
    if waits.all_reported and sum(report.alive for report in reports.values()) == 1:
        return Finding(FindingKind.ALIKE, (BlamedRank(first.rank, words.doing(first)),), certain=True)
    call = next((call for rank in sorted(overdue) for call in waits.calls.get(rank, ())), None)
    if call is None:
        example = f"for example, rank {first.rank} {words.doing(first)}"
        reason = f"no rank makes progress, and all ranks are in the same state; {example}"
        return Finding(FindingKind.ALIKE, (BlamedRank(first.rank, reason),), certain=False)
    done = [
        rank
        for rank, report in reports.items()
        if any(c.group == call.group and c.seq == call.seq and c.finished_s is not None for c in report.calls)
    ]
    ends = f"only {words.ranks(done)} finished it" if done else "none has finished it"
    longest = max(words.inside_s(reports[rank], call) for rank in waits.inside[call])
    reason = (
        f"all ranks have entered {words.call(waits.described[call])} and {ends} in {words.seconds(longest)}; "
        "the probable cause is the network or a device"
    )
    return Finding(FindingKind.ALIKE, (BlamedRank(waits.inside[call][0], reason),), certain=False)


# --- evidence of a hang, if the user has set no limit -----------------------------------------------
#
# Theory of operation
# -------------------
# A job hangs if a rank waits for another rank, and no rank shows a sign of life for its limit. The limit is the
# longest timeout that the script has set for a process group of the rank, and at least ten minutes. A rank that still
# does something may be what all others wait for, although no status page shows it: ranks also wait for files, for
# queues and in the store. So one such rank is enough to leave the job alone. A rank that waits in a collective may
# spin, so CPU time of its own process is not a sign of life then.
#
# Ranks that all wait under the same number of a group, in different collectives, can never go on. That needs no
# limit.


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
    return {rank: _with_limit_of_script(report, rank in waiting) for rank, report in reports.items()}


def _with_limit_of_script(report: RankReport, waits: bool) -> RankReport:
    if report.idle_s is None:
        return report
    stalled_s = report.idle_s if waits else report.stalled_s
    return replace(report, stalled_s=stalled_s, limit_s=report.idle_limit_s)


def is_silent(reports: Mapping[int, RankReport], world_size: int) -> bool:
    """Whether no rank has shown a sign of life since its limit. Every agent must have answered."""
    return len(reports) == world_size and all(s.is_overdue for s in reports.values() if s.alive)


def blames_one_of(waiting: Collection[int], found: Finding) -> bool:
    return any(each.rank in waiting for each in found.blamed)


# --- the collectives of flight recorders in place of those of status pages --------------------------
#
# A page records calls that pass through Python. Calls that C++ starts (the buckets of torch's DDP, functional
# collectives) are only in torch's flight recorder. The recorder gives a call the same number on all members of the
# group, but not the number that the page gives it, so the two cannot be compared. The calls of a group are taken from
# the recorders if all members that have used the group sent their recorder, and at least one recorder has more calls
# than the page. Otherwise they are taken from the pages. Sends and receives are always taken from the pages.


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


def of_recorders(reports: Mapping[int, RankReport]) -> list[str]:
    """What flight recorders that people have collected show, without the pages and agents of a running job."""
    own = {
        rank: replace(report, calls=report.recorded, groups=report.recorder)
        for rank, report in reports.items()
    }
    listed = [rank for each in own.values() for group in each.groups for rank in members_of([group], 0)]
    waits = waits_of(own, 1 + max((*own, *listed), default=0))
    found = desync(waits, waits.calls)
    if found is not None:
        return [f"{words.ranks([each.rank])} {each.reason}" for each in found.blamed]
    missing = [f"{words.ranks([rank])}: {words.waiting_for(waits, rank)}" for rank in waits.roots()]
    complete = [
        f"{words.wait(waits.inside[call])} in {words.call(waits.described[call])}, which all ranks have entered: "
        "check network and GPUs"
        for call, absent in waits.missing.items()
        if not absent
    ]
    unread = [rank for rank in waits.roots() if rank not in own]
    return [*(missing or complete), *([f"no dump of {words.ranks(unread)}"] if unread else [])]


# --- post-mortem: the cause of a failed generation, from the last reports of its ranks --------------
#
# Theory of operation
# -------------------
# Some errors only show that communication has ended: a peer closed its connection, or sent data of an unexpected
# size. The rank that gets such an error is not always the cause, and may be the only rank with an error. But the
# agents keep the status pages of their ranks, and the pages show which collectives each rank had entered. So if the
# first cause is such an error, the service compares the reports of all ranks at the time of the stop order:
#
#     different   ranks called different operations under the same number of a group (desync)
#     left        a rank had exited without an error, and others wait for it in a collective that it never entered
#     late        the timeout of a process group expired on a rank that waited for a rank which never entered the call
#     gone        a rank had exited without an error before other ranks lost their connections. The call is not on any
#                 page (the buckets of torch's own DDP), so the finding is not certain
#
# If the reports show none of these, the cause does not change. A hang was already examined when it was found.

_LAST_REPORTS = 24  # lines
_HINT = (
    "all ranks must enter the same collectives, in the same order and with the same sizes, and must not exit before "
    "the last one"
)
_HINT_LATE = (
    "the timeout of the process group expired, which init_process_group(timeout=...) sets; "
    "see ddp-launch docs hangs"
)
_FAILURES = {FindingKind.ABSENT: FailureClass.EXIT_CODE, FindingKind.LATE: FailureClass.HANG}
_WHERE_BUCKETS_ARE_WAITED_FOR = (RankPhase.BACKWARD, RankPhase.COMMUNICATE, RankPhase.EXITING)


def explained(
    first: Cause,
    causes: FrozenMap[int, Cause],
    last_seen: FrozenMap[str, tuple[RankReport, ...]],
    world: World,
) -> Cause | None:
    """A better cause in place of `first`, or None if no better one is known."""
    if not first.may_be_a_consequence or not last_seen:
        return None
    # An agent's reports count only for its own ranks.
    by_place = ((place, last_seen.get(place.agent.node, ())) for place in world.placements)
    reports = {report.rank: report for place, seen in by_place for report in seen if _has(place, report.rank)}
    waits = waits_of(reports, world.size)
    found = (
        desync(waits, waits.calls)
        or _exited_ranks(waits, causes)
        or _late(waits, causes)
        or _gone(reports, causes, first)
    )
    if found is None:
        return None
    evidence = "\n".join(words.line(reports[rank]) for rank in sorted(reports)[:_LAST_REPORTS])
    occasion = f"rank {first.rank} on {first.node}: {first.reason}"
    text = "\n\n".join(part for part in (evidence, occasion, first.traceback) if part)
    named = found.blamed[0]
    exit_code = NO_PROGRESS if found.kind is FindingKind.LATE else first.exit_code or 1
    failure = _FAILURES.get(found.kind, FailureClass.USER_EXCEPTION)
    hint = _HINT_LATE if found.kind is FindingKind.LATE else _HINT
    first = replace(first, failure=failure, exit_code=exit_code, hint=hint)
    if not found.certain:
        doubt = Doubt.CULPRIT if found.suspects else Doubt.SHARED_ERROR
        reason = f"{named.reason}; {first.reason}"
        return replace(first, reason=reason, traceback=text, doubt=doubt, suspects=found.suspects)
    others = [each.rank for each in found.blamed[1:]]
    reason = f"{named.reason}; the same for {words.ranks(others)}" if others else named.reason
    own = causes.get(named.rank)
    return replace(
        _cause(world, named.rank, reason, first),
        traceback=text,
        step=reports[named.rank].step,
        log=own.log if own is not None else "",
    )


def _cause(world: World, rank: int, reason: str, first: Cause) -> Cause:
    home = next(place for place in world.placements if _has(place, rank))
    return Cause(
        node=home.agent.node,
        rank=rank,
        local_rank=rank - home.rank_offset,
        failure=first.failure,
        reason=reason,
        exit_code=first.exit_code,
        ran_s=first.ran_s,
        at=first.at,
        hint=first.hint,
    )


def _has(place: Placement, rank: int) -> bool:
    return place.rank_offset <= rank < place.rank_offset + place.facts.nproc


def _exited_ranks(waits: Waits, causes: FrozenMap[int, Cause]) -> Finding | None:
    blamed = [
        BlamedRank(rank, f"exited without an error; {words.waiting_for(waits, rank)}")
        for rank in waits.roots()
        if rank not in causes and (report := waits.reports.get(rank)) is not None and _has_ended(report)
    ]
    return Finding(FindingKind.ABSENT, tuple(blamed), certain=True) if blamed else None


def _gone(reports: Mapping[int, RankReport], causes: FrozenMap[int, Cause], first: Cause) -> Finding | None:
    lost = reports.get(first.rank)
    if lost is None:
        return None
    gone = [s for s in reports.values() if s.rank not in causes and _ended_before(s, lost)]
    if not gone:
        return None
    reason = f"exited without an error before rank {first.rank} lost the connection to its peers"
    return _doubtful(FindingKind.ABSENT, gone, reason)


def _ended_before(report: RankReport, other: RankReport) -> bool:
    both_left = report.phase is RankPhase.EXITING and other.phase is RankPhase.EXITING
    return report.known and _has_ended(report) and not (both_left and report.phase_s <= other.phase_s)


def _late(waits: Waits, causes: FrozenMap[int, Cause]) -> Finding | None:
    """Live ranks that do not wait for others, and for which another rank waited until its own timeout expired."""
    waiting = [rank for rank, cause in causes.items() if _ran_out_of_time(cause)]
    awaited = [late for rank in waiting for late in waits.next_of(rank)]
    known = [waits.reports[rank] for rank in waits.roots() if rank in awaited and rank in waits.reports]
    seen = [report for report in known if report.alive]
    if not seen:
        return _not_waiting(waits) if waiting and not waits.calls else None
    late = [report.rank for report in seen]
    outnumbered = sum(1 for rank in waits.calls if any(m in late for m in waits.next_of(rank))) > len(late)
    certain = all(explains_itself(s) for s in seen) or (outnumbered and all(s.known for s in seen))
    return Finding(
        FindingKind.LATE,
        tuple(blame(s, f"; {words.waiting_for(waits, s.rank)}") for s in seen),
        certain,
        suspects=() if certain else tuple(late),
    )


def _not_waiting(waits: Waits) -> Finding | None:
    """The ranks that do not wait, if the call that timed out is not on any page (the buckets of torch's own DDP)."""
    seen = [
        s
        for s in waits.reports.values()
        if s.known and s.alive and s.phase not in _WHERE_BUCKETS_ARE_WAITED_FOR
    ]
    if not seen or len(seen) * 2 > len(waits.reports):
        return None
    return _doubtful(FindingKind.LATE, seen, words.doing(seen[0]))


def _doubtful(kind: FindingKind, seen: Sequence[RankReport], reason: str) -> Finding:
    suspects = tuple(report.rank for report in seen)
    return Finding(kind, (BlamedRank(suspects[0], reason),), certain=False, suspects=suspects)


def _ran_out_of_time(cause: Cause) -> bool:
    text = f"{cause.reason}\n{cause.traceback}".lower()
    return cause.failure is FailureClass.CONSEQUENCE and any(phrase in text for phrase in OUT_OF_TIME)


def _has_ended(report: RankReport) -> bool:
    return not report.alive or report.process == "Z"
