"""Find the rank that stalls a job, from the reports of all ranks together. Pure.

Theory of operation
-------------------
There is no finding unless some rank is overdue: it has stalled for longer than its current activity allows. The checks
follow in this order:

0. If torch's flight recorders know more collectives than the pages, the service uses the recorders instead (see
   rendezvous/diagnosing/recorded.py). Only they see the buckets of torch's own DDP, which C++ starts.
1. desync: ranks are in the same numbered collective of a group, but it is a different one for some of them (the
   operation, the number of elements or their type). The finding names the minority. Without a minority it names both
   sides, and the culprit is uncertain.
2. absent: other ranks wait for a rank that does not wait itself (see waits.py). This rank is the reason, together with
   what its own report shows. If it is not overdue itself (a checkpoint, an evaluation, a long step), all is in order:
   `Patience` says when to ask again. Some ranks may complete a collective that blocks others. Then a rank that is
   stopped within it is the reason, and the ranks that wait beside it are not.
3. deadlock: ranks wait for each other in a cycle.
4. apart: no collective shows the reason, since they are hidden or all ranks have entered. But a rank differs from the
   others: it is stopped, has ended, is behind all others, or computes while they sleep.
5. alike: the ranks do not differ. Then the reason is the network or a device, or all ranks have the same problem, and
   no rank is to blame.

A finding is `certain` only if the reports permit no other explanation. A rank that sleeps in its forward or backward
pass may wait for others in a hidden collective. So it is the certain reason only if its flight recorder shows no such
call, or if more ranks wait for it than are on its side. If a debugger holds a rank, or every rank of a world is
stopped, there is no finding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing import hang_text as words
from rendezvous.diagnosing.desync import desync
from rendezvous.diagnosing.finding import CHARGED, Charge, Finding, Kind, Patience, charge
from rendezvous.diagnosing.recorded import with_recorded
from rendezvous.diagnosing.waits import waits_of
from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rendezvous.diagnosing.waits import Waits
    from rendezvous.values.rank_report import RankReport

_EVIDENCE = 24  # lines
SHORTEST_PATIENCE_S, LONGEST_PATIENCE_S = 0.25, 15.0


def diagnose(reports: Mapping[int, RankReport], world_size: int) -> Finding | Patience | None:
    """Diagnose a stall. `reports` lacks the ranks of agents that have not answered."""
    reports = with_recorded(reports, world_size)
    overdue = [rank for rank, s in reports.items() if s.known and s.alive and s.is_overdue]
    running = [report for report in reports.values() if report.alive]
    if not overdue or any(report.process == "t" for report in running):
        return None
    if all(report.is_stopped for report in running) and len(running) > 1:
        return None  # an operator has stopped the job, and can continue it
    waits = waits_of(reports, world_size)
    found = (
        desync(waits, overdue)
        or _absent(waits, overdue)
        or _deadlock(waits)
        or _apart(reports, waits, overdue)
        or _alike(reports, waits, overdue)
    )
    if isinstance(found, Patience):
        return found
    suspects = () if found.certain or found.kind is Kind.ALIKE else tuple(c.rank for c in found.charges)
    return replace(found, charges=_worded(found), suspects=suspects, evidence=_evidence(reports, found))


def _worded(found: Finding) -> tuple[Charge, ...]:
    """If the finding is certain, each reason names all ranks that are charged."""
    charges = found.charges[:CHARGED]
    if not found.certain:
        return charges
    ranks = [each.rank for each in found.charges]

    def reason(one: Charge) -> str:
        others = [rank for rank in ranks if rank != one.rank]
        return f"{one.reason}; so {words.ranks(others)}" if others else one.reason

    return tuple(replace(each, reason=reason(each)) for each in charges)


def _evidence(reports: Mapping[int, RankReport], found: Finding) -> tuple[str, ...]:
    """One line per rank: the charged ranks first, then the others in order, up to a limit."""
    charged = [charge.rank for charge in found.charges]
    others = [rank for rank in sorted(reports) if rank not in charged]
    told = [words.line(reports[rank]) for rank in (*charged, *others)[:_EVIDENCE] if rank in reports]
    left = len(reports) - len(told)
    return (*told, *((f"... and {left} more ranks",) if left > 0 else ()))


# --- 2. absent -----------------------------------------------------------------------------------------


def _absent(waits: Waits, overdue: Sequence[int]) -> Finding | Patience | None:
    roots = waits.roots()
    seen = [waits.reports[rank] for rank in roots if rank in waits.reports]
    due = [report for report in seen if report.is_overdue]
    waiting = waits.blocked()
    if not due:
        if not roots or not any(rank in waiting for rank in overdue):
            return None
        return _patience(seen) if seen else _unheard(waits, roots)
    beside = _beside_the_reason(waits, due)
    due = [report for report in due if report.rank not in beside]
    outnumbered = len(waiting) + len(beside) > len(roots) - len(beside)
    certain = all(explains_itself(s) for s in due) or (outnumbered and all(s.known for s in due))
    if not certain and len(waiting) < len(
        due
    ):  # perhaps these ranks entered a call that the others never enter
        return _strangers(waits, waiting, due)
    charges = tuple(charge(s, f"; {words.who_waits(waits, s.rank)}") for s in due)
    return Finding(Kind.ABSENT, charges, certain)


def _beside_the_reason(waits: Waits, due: Sequence[RankReport]) -> dict[int, RankReport]:
    """Overdue roots in a collective that all ranks entered, if another overdue root is not in one, or is stuck."""
    inside = [s for s in due if s.phase is RankPhase.COMMUNICATE and s.rank in waits.calls]
    beside = {s.rank: s for s in inside if s.alive and s.process not in _STUCK}
    return beside if len(beside) < len(due) else {}


def _patience(reports: Sequence[RankReport]) -> Patience:
    """The time until the first of these ranks is overdue."""
    lefts = [s.limit_s - s.stalled_s for s in reports if s.limit_s is not None]
    return Patience(max(SHORTEST_PATIENCE_S, min([*lefts, LONGEST_PATIENCE_S])))


_STUCK = ("T", "D", "F")
_OWN_BUSINESS = (
    RankPhase.DATA,
    RankPhase.CHECKPOINT,
    RankPhase.EVALUATION,
    RankPhase.SECTION,
    RankPhase.OPTIMIZER,
    RankPhase.EXITING,
)


def explains_itself(report: RankReport) -> bool:
    """Whether the report shows that the rank does not wait for others in a hidden call."""
    if not report.alive or report.process in _STUCK:
        return True
    if report.recorder and not report.waits_in and report.phase in (RankPhase.FORWARD, RankPhase.BACKWARD):
        return True
    return report.known and (
        report.phase in _OWN_BUSINESS or (report.busy and report.phase is not RankPhase.COMMUNICATE)
    )


def _unheard(waits: Waits, roots: Sequence[int]) -> Finding:
    """The finding if the only missing ranks are those whose agents did not answer."""
    charges = [
        Charge(rank, f"its agent did not say how it is; {words.who_waits(waits, rank)}")
        for rank in roots[:CHARGED]
    ]
    return Finding(Kind.ABSENT, tuple(charges), certain=False)


def _strangers(waits: Waits, waiting: Sequence[int], others: Sequence[RankReport]) -> Finding:
    charges = tuple(
        Charge(
            rank,
            f"waits in {words.call(waits.told[waits.calls[rank][0]])}, which {words.ranks([s.rank for s in others])} "
            f"never entered: {words.place(others[0], len(others) > 1)}",
        )
        for rank in waiting
    )
    return Finding(Kind.DESYNC, charges, certain=False)


# --- 3. deadlock ---------------------------------------------------------------------------------------


def _deadlock(waits: Waits) -> Finding | None:
    stuck = waits.unexplained()
    if not stuck:
        return None
    circle = waits.circle(stuck[0])
    first_calls = {rank: next(c for c in waits.calls[rank] if waits.missing[c]) for rank in stuck}
    sizes = Counter(first_calls.values())
    ((common, n_common),) = sizes.most_common(1)
    way = "; ".join(
        f"rank {rank} waits in {words.call(waits.told[first_calls[rank]], False)}"
        for rank in circle[:CHARGED]
    )
    reason = f"deadlock: {way}; each waits for the next"
    if n_common * 2 > len(stuck) and n_common < len(stuck):
        odd = [rank for rank in stuck if first_calls[rank] != common]
        where = words.call(waits.told[common], False)
        reason += f"; {n_common} of {len(stuck)} ranks are in {where}"
        return Finding(Kind.DEADLOCK, tuple(Charge(rank, reason) for rank in odd), certain=True)
    return Finding(Kind.DEADLOCK, tuple(Charge(rank, reason) for rank in circle), certain=False)


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
        told = _others_in_words([report for report in everyone if report not in group], waits)
        charges = tuple(charge(s, told) for s in due)
        return Finding(Kind.APART, charges, certain and waits.all_told and len(due) == len(group))
    return None


def _apart_groups(
    everyone: Sequence[RankReport], overdue: Sequence[RankReport]
) -> list[tuple[list[RankReport], bool]]:
    """Groups of ranks that differ from all others, the strongest difference first, each with whether it is proof."""
    known = [s for s in everyone if s.known and s.alive and s.phase is not RankPhase.EXITING]
    behind = _furthest_behind(known)
    alive = [s for s in everyone if s.alive]
    groups = [([s for s in everyone if s.is_stopped], True)]
    if len(alive) == 1 and explains_itself(alive[0]):
        groups.append((alive, True))
    if not any(
        explains_itself(s) for s in overdue
    ):  # the ranks that are left may wait for those that have ended
        gone = [s for s in everyone if not s.alive or s.phase is RankPhase.EXITING]
        groups.append((gone, not any(s.alive for s in gone) and not any(s.waits_in for s in overdue)))
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
        return f"; {words.wait(numbers)} in {words.call(waits.told[inside])}, which all ranks have entered"
    places = dict.fromkeys(words.place(report, len(others) > 1) for report in others)
    verb = "is" if len(numbers) == 1 else "are"
    steps = sorted({report.step for report in others})
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
    return f"; {words.ranks(numbers)} {verb} {' or '.join(places)} (after {at})"


# --- 5. alike ------------------------------------------------------------------------------------------


def _alike(reports: Mapping[int, RankReport], waits: Waits, overdue: Sequence[int]) -> Finding:
    first = reports[min(overdue)]
    if waits.all_told and sum(report.alive for report in reports.values()) == 1:
        return Finding(Kind.ALIKE, (Charge(first.rank, words.doing(first)),), certain=True)
    call = next((call for rank in sorted(overdue) for call in waits.calls.get(rank, ())), None)
    if call is None:
        reason = f"all ranks stand still alike: rank {first.rank} {words.doing(first)}"
        return Finding(Kind.ALIKE, (Charge(first.rank, reason),), certain=False)
    done = [
        rank
        for rank, report in reports.items()
        if any(c.group == call.group and c.seq == call.seq and c.finished_s is not None for c in report.calls)
    ]
    ends = f"only {words.ranks(done)} finished it" if done else "none has finished it"
    longest = max(words.inside_s(reports[rank], call) for rank in waits.inside[call])
    reason = (
        f"all ranks have entered {words.call(waits.told[call])} and {ends} in {words.seconds(longest)}: "
        "the network or a device"
    )
    return Finding(Kind.ALIKE, (Charge(waits.inside[call][0], reason),), certain=False)
