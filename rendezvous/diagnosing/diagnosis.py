"""Find the rank that stalls a job, from the reports of all ranks together. Pure.

Theory of operation
-------------------
By default, a finding needs evidence; evidence.py decides that there is enough of it. If the user has set limits, it
needs an overdue rank: a rank that has stalled for longer than the limit of its current activity. The reports come from
the ranks' status pages, in shared memory. The checks run in this order:

0. If torch's flight recorders contain more collectives than the status pages, the service uses the recorders instead
   (see rendezvous/diagnosing/recorded.py). Only they record the all-reduce calls that torch's own DDP starts in C++.
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
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing import evidence
from rendezvous.diagnosing import hang_text as words
from rendezvous.diagnosing.desync import desync
from rendezvous.diagnosing.finding import (
    LONGEST_PATIENCE_S,
    MAX_BLAMED,
    SHORTEST_PATIENCE_S,
    BlamedRank,
    Finding,
    Kind,
    Patience,
    blame,
)
from rendezvous.diagnosing.recorded import with_recorded
from rendezvous.diagnosing.waits import waits_of
from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rendezvous.diagnosing.waits import Waits
    from rendezvous.values.rank_report import RankReport

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
    suspects = () if found.certain or found.kind is Kind.ALIKE else tuple(each.rank for each in found.blamed)
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
    waiting = evidence.waiting_ranks(reports)
    if not waiting or all(report.idle_s is None for report in reports.values()):
        return None
    different = evidence.mismatch(waits_of(reports, world_size), waiting)
    if different is not None:
        return different
    reports = evidence.by_limit(reports, waiting)
    if not evidence.is_silent(reports, world_size):
        return None
    waits = waits_of(reports, world_size)
    found = _absent(waits, waiting) or _deadlock(waits) or _apart(reports, waits, waiting)
    if not isinstance(found, Finding) or (
        found.kind is Kind.APART and evidence.blames_one_of(waiting, found)
    ):
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
    return Finding(Kind.ABSENT, blamed, certain)


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
    return Finding(Kind.ABSENT, tuple(blamed), certain=False)


def _ended(waiting: RankReport, ended: Sequence[int], more: str) -> Finding:
    """No rank is the cause: ranks wait for ranks that have ended without an error."""
    have = "has" if len(ended) == 1 else "have"
    reason = f"{words.ranks(ended)} {have} exited without an error; {more}"
    return Finding(Kind.ALIKE, (BlamedRank(waiting.rank, reason),), certain=False)


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
    return Finding(Kind.DESYNC, blamed, certain=False)


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
        return Finding(Kind.DEADLOCK, tuple(BlamedRank(rank, reason) for rank in minority), certain=True)
    return Finding(Kind.DEADLOCK, tuple(BlamedRank(rank, reason) for rank in circle), certain=False)


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
        return Finding(Kind.APART, blamed, certain and waits.all_reported and len(due) == len(group))
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
        return Finding(Kind.ALIKE, (BlamedRank(first.rank, words.doing(first)),), certain=True)
    call = next((call for rank in sorted(overdue) for call in waits.calls.get(rank, ())), None)
    if call is None:
        example = f"for example, rank {first.rank} {words.doing(first)}"
        reason = f"no rank makes progress, and all ranks are in the same state; {example}"
        return Finding(Kind.ALIKE, (BlamedRank(first.rank, reason),), certain=False)
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
    return Finding(Kind.ALIKE, (BlamedRank(waits.inside[call][0], reason),), certain=False)
