"""Find the cause of a failed generation from the last reports of its ranks, if their errors do not show it. Pure.

Theory of operation
-------------------
Some errors only show that communication has ended: a peer closed its connection, or sent data of an unexpected size.
The rank that gets such an error is not always the cause, and may be the only rank with an error. But the agents keep
the status pages of their ranks, and the pages show which collectives each rank had entered. So if the first cause is
such an error, the service compares the reports of all ranks at the time of the stop order:

    different   ranks called different operations under the same number of a group (desync.py)
    left        a rank had exited without an error, and others wait for it in a collective that it never entered
    late        the timeout of a process group expired on a rank that waited for a rank which never entered the call
    gone        a rank had exited without an error before other ranks lost their connections. The call is not on any
                page (the buckets of torch's own DDP), so the finding is not certain

If the reports show none of these, the cause does not change. A hang was already examined when it was found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing import hang_text as words
from rendezvous.diagnosing.desync import desync
from rendezvous.diagnosing.diagnosis import explains_itself
from rendezvous.diagnosing.finding import TIMED_OUT_EXIT_CODE, BlamedRank, Finding, Kind, blame
from rendezvous.diagnosing.waits import waits_of
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import Cause, Doubt, FailureClass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rendezvous.diagnosing.waits import Waits
    from rendezvous.values.frozen_map import FrozenMap
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.types import Placement, World

_EVIDENCE = 24  # lines
_HINT = (
    "all ranks must enter the same collectives, in the same order and with the same sizes, and must not exit before "
    "the last one"
)
_HINT_LATE = (
    "the timeout of the process group expired, which init_process_group(timeout=...) sets; "
    "see ddp-launch docs hangs"
)
_FAILURES = {Kind.ABSENT: FailureClass.EXIT_CODE, Kind.LATE: FailureClass.HANG}
# Errors of a rank that has waited for the whole timeout of its group.
OUT_OF_TIME = (
    "timed out waiting",
    "wait timeout after",
    "failed to pass monitoredbarrier",
    "watchdog caught collective operation timeout",
    "timed out in blocking wait",
    "has not joined",
)

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
        or _left(waits, causes)
        or _late(waits, causes)
        or _gone(reports, causes, first)
    )
    if found is None:
        return None
    evidence = "\n".join(words.line(reports[rank]) for rank in sorted(reports)[:_EVIDENCE])
    occasion = f"rank {first.rank} on {first.node}: {first.reason}"
    text = "\n\n".join(part for part in (evidence, occasion, first.traceback) if part)
    named = found.blamed[0]
    exit_code = TIMED_OUT_EXIT_CODE if found.kind is Kind.LATE else first.exit_code or 1
    failure = _FAILURES.get(found.kind, FailureClass.USER_EXCEPTION)
    hint = _HINT_LATE if found.kind is Kind.LATE else _HINT
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


def _left(waits: Waits, causes: FrozenMap[int, Cause]) -> Finding | None:
    blamed = [
        BlamedRank(rank, f"exited without an error; {words.waiting_for(waits, rank)}")
        for rank in waits.roots()
        if rank not in causes and (report := waits.reports.get(rank)) is not None and _has_ended(report)
    ]
    return Finding(Kind.ABSENT, tuple(blamed), certain=True) if blamed else None


def _gone(reports: Mapping[int, RankReport], causes: FrozenMap[int, Cause], first: Cause) -> Finding | None:
    lost = reports.get(first.rank)
    if lost is None:
        return None
    gone = [s for s in reports.values() if s.rank not in causes and _ended_before(s, lost)]
    if not gone:
        return None
    reason = f"exited without an error before rank {first.rank} lost the connection to its peers"
    return _doubtful(Kind.ABSENT, gone, reason)


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
        Kind.LATE,
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
    return _doubtful(Kind.LATE, seen, words.doing(seen[0]))


def _doubtful(kind: Kind, seen: Sequence[RankReport], reason: str) -> Finding:
    suspects = tuple(report.rank for report in seen)
    return Finding(kind, (BlamedRank(suspects[0], reason),), certain=False, suspects=suspects)


def _ran_out_of_time(cause: Cause) -> bool:
    text = f"{cause.reason}\n{cause.traceback}".lower()
    return cause.failure is FailureClass.CONSEQUENCE and any(phrase in text for phrase in OUT_OF_TIME)


def _has_ended(report: RankReport) -> bool:
    return not report.alive or report.process == "Z"
