"""A generation has failed: what its ranks left behind may say more than their errors do. Pure.

Theory of operation
-------------------
Some errors only tell that communication has ended: a peer has closed its connection, or sent something of another
size than was expected. Whoever gets one need not be who did wrong, and may be the only one who says anything. But the
agents keep their ranks' pages, and on these stands what every rank had entered. So where the first cause is of that
kind, all views of the moment in which the stop was ordered are put side by side:

    different   ranks were in the same numbered collective, and it was another one for some (desync.py)
    left        a rank had ended without an error, and others wait for it in a collective that it never entered

Where they show neither, the cause stays what it was. A hang has been examined already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing import hang_words as words
from rendezvous.diagnosing.desync import desync
from rendezvous.diagnosing.finding import Charge, Finding, Kind
from rendezvous.diagnosing.waits import waits_of
from rendezvous.types import Cause, FailureClass

if TYPE_CHECKING:
    from rendezvous.diagnosing.sight import Sight
    from rendezvous.diagnosing.waits import Waits
    from rendezvous.rounds.frozen_map import FrozenMap
    from rendezvous.types import Placement, World

_EVIDENCE = 24  # lines
_HINT = "all ranks must enter the same collectives, in the same order and of the same size, and leave after the last"


def explained(
    first: Cause, causes: FrozenMap[int, Cause], last_seen: FrozenMap[str, tuple[Sight, ...]], world: World
) -> Cause | None:
    """What to say in place of `first`; None: nothing better is known."""
    if not first.may_be_a_consequence or not last_seen:
        return None
    # Of its own ranks only, whatever an agent says.
    told = ((place, last_seen.get(place.agent.node, ())) for place in world.placements)
    sights = {sight.rank: sight for place, seen in told for sight in seen if _has(place, sight.rank)}
    waits = waits_of(sights, world.size)
    found = desync(waits, waits.calls) or _left(waits, causes)
    if found is None:
        return None
    evidence = "\n".join(words.line(sights[rank]) for rank in sorted(sights)[:_EVIDENCE])
    occasion = f"rank {first.rank} on {first.node}: {first.reason}"
    text = "\n\n".join(part for part in (evidence, occasion, first.traceback) if part)
    charge = found.charges[0]
    if not found.certain:
        reason = f"{charge.reason}; {first.reason}"
        failure = FailureClass.USER_EXCEPTION
        return replace(first, failure=failure, reason=reason, traceback=text, hint=_HINT, uncertain=True)
    others = [each.rank for each in found.charges[1:]]
    reason = f"{charge.reason}; so {words.ranks(others)}" if others else charge.reason
    failure = FailureClass.EXIT_CODE if found.kind is Kind.ABSENT else FailureClass.USER_EXCEPTION
    own = causes.get(charge.rank)
    return replace(
        _cause(world, charge.rank, failure, reason, first),
        traceback=text,
        step=sights[charge.rank].step,
        log=own.log if own is not None else "",
    )


def _cause(world: World, rank: int, failure: FailureClass, reason: str, first: Cause) -> Cause:
    home = next(place for place in world.placements if _has(place, rank))
    return Cause(
        node=home.agent.node,
        rank=rank,
        local_rank=rank - home.rank_offset,
        failure=failure,
        reason=reason,
        exit_code=first.exit_code or 1,
        ran_s=first.ran_s,
        at=first.at,
        hint=_HINT,
    )


def _has(place: Placement, rank: int) -> bool:
    return place.rank_offset <= rank < place.rank_offset + place.facts.nproc


def _left(waits: Waits, causes: FrozenMap[int, Cause]) -> Finding | None:
    charges = [
        Charge(rank, f"has ended, and without an error; {words.who_waits(waits, rank)}")
        for rank in waits.roots()
        if rank not in causes and (sight := waits.sights.get(rank)) is not None and _has_ended(sight)
    ]
    return Finding(Kind.ABSENT, tuple(charges), certain=True) if charges else None


def _has_ended(sight: Sight) -> bool:
    return not sight.alive or sight.process == "Z"
