"""Pauses ranks instead of ending them: the agent's part of a heal in place. Pure; steps of launcher/supervision.py.

Theory of operation
-------------------
A rank *heals* while it is inside `State.run` of `ddp.elastic`: its guard can pause it. The agent tells the service when
all live ranks of its node heal, and why a script never can (`HealReady`).

    Stop(in_place)            ranks that heal are paused, the others get SIGTERM
    RankParked                a rank has left its collectives, and waits
    GraceOver                 a rank that has neither parked nor ended is killed
    all have parked or ended  Sweep, which spares the parked ranks; then AgentStopped(parked)
    StoreAt                   StartRanks: parked ranks continue, the missing ones are started

So each rank is paused on its own. One that does not park in time is started anew, as in a restart.

Parked ranks are live. They continue only in a generation that is assigned in place. Every other way on stops them with
signals first: a world without this node, the end of the job, a plain restart, a loss of contact. If a parked rank ends
while its node waits for the next generation, it is started anew there; that is not a failure of this generation. But
the service must know: if it was the last one of the job, the new ranks would join nobody.

A rank may park before it is asked to, because its collective has failed. The reason is usually the end of another rank,
which the agent of that rank reports. If no stop follows, the agent reports the parked rank itself: otherwise ranks
could wait for each other forever, for example after an error of the network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.exchange import (
    AbortGroups,
    CannotHeal,
    Grace,
    GraceOver,
    PauseRanks,
    RankHeals,
    RankParked,
    Send,
    SignalRanks,
    StartGrace,
)
from launcher.stop_sequence import SIGTERM, signal_ranks, sweep
from launcher.supervised import Phase
from rendezvous.values.events import AgentStopped, HealReady, RankFailed
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from launcher.exchange import Action, RankEnded
    from launcher.supervised import Step, Supervision
    from rendezvous.values.types import Assignment

_ENDED_PAUSED = "ended while it was paused"
_LOST_PEERS = "lost the connection to its peers, and no other failure was reported"


def pause(state: Supervision, event: RankHeals | CannotHeal | RankParked | GraceOver) -> Step:
    known = event.generation == state.generation
    if not known or (not isinstance(event, GraceOver) and event.local_rank not in state.live):
        return state, ()
    match event:
        case RankHeals(_, local_rank, heals) if state.phase is Phase.RUNNING:
            return _rank_heals(state, local_rank, heals=heals)
        case CannotHeal(generation, _, reason) if state.phase is Phase.RUNNING:
            return replace(state, is_ready=False), (Send(HealReady(state.agent, generation, False, reason)),)
        case RankParked(_, local_rank) if local_rank not in state.parked:
            return _rank_parked(state, local_rank)
        case GraceOver():
            return _unasked(state)
        case _:
            return state, ()


def _rank_heals(state: Supervision, local_rank: int, *, heals: bool) -> Step:
    others = tuple(rank for rank in state.heals if rank != local_rank)
    return report_ready(replace(state, heals=tuple(sorted((*others, local_rank))) if heals else others))


def report_ready(state: Supervision) -> Step:
    """Tell the service if this has changed: whether all live ranks can be paused."""
    is_ready = set(state.live) == set(state.heals)
    if state.phase is not Phase.RUNNING or not state.live or is_ready == state.is_ready:
        return state, ()
    told = Send(HealReady(state.agent, state.generation, is_ready))
    return replace(state, is_ready=is_ready), (told,)


def _rank_parked(state: Supervision, local_rank: int) -> Step:
    state = replace(state, parked=tuple(sorted((*state.parked, local_rank))))
    if state.phase is Phase.RUNNING:
        return state, (StartGrace(state.generation, Grace.UNASKED),)
    return sweep_in_place(state)


def answer(state: Supervision, generation: int) -> Step:
    """Tell the service that the ranks of this generation are parked or reaped."""
    return state, (Send(AgentStopped(state.agent, generation, state.last_seen, state.parked)),)


def missing_ranks(state: Supervision, assignment: Assignment) -> tuple[Action, ...]:
    """The service counts on paused ranks of this node that have ended meanwhile: report their end in this world."""
    lost = (rank for rank in assignment.parked if rank not in state.parked)
    node, failure = state.agent.node, FailureClass.EXIT_CODE
    causes = (Cause(node, assignment.rank_offset + i, i, failure, _ENDED_PAUSED, exit_code=1) for i in lost)
    return tuple(Send(RankFailed(state.agent, assignment.generation, cause)) for cause in causes)


def parked_rank_ended(state: Supervision, event: RankEnded, assignment: Assignment) -> Step:
    """A parked rank, which is no longer live, has ended before it continued. `state` is that of a node that waits."""
    if state.over:  # no later world is known
        return answer(state, max(state.generation, state.missed))
    rank, node = assignment.rank_offset + event.local_rank, state.agent.node
    cause = event.cause or Cause(
        node, rank, event.local_rank, FailureClass.EXIT_CODE, _ENDED_PAUSED, exit_code=1
    )
    return state, (Send(RankFailed(state.agent, state.generation, replace(cause, rank=rank))),)


def _unasked(state: Supervision) -> Step:
    """Report a rank that has parked although no failure was reported."""
    mine = state.assignment
    if mine is None or state.phase is not Phase.RUNNING or not state.parked:
        return state, ()
    first = min(state.parked)
    failure = FailureClass.CONSEQUENCE
    cause = Cause(state.agent.node, mine.rank_offset + first, first, failure, _LOST_PEERS, exit_code=1)
    return state, (Send(RankFailed(state.agent, state.generation, cause)),)


# --- the stop in place -----------------------------------------------------------------------------


def pause_ranks(state: Supervision, reason: str) -> Step:
    """Begin: the ranks that cannot be paused, and those that are the cause of a hang, are ended."""
    generation = state.generation
    running = [rank for rank in state.live if rank not in state.parked]
    paused = tuple(rank for rank in running if rank in state.heals and rank not in state.accused_ranks)
    others = tuple(rank for rank in running if rank not in paused)
    state = replace(state, in_place=True, is_sweeping=False, stop_signal=SIGTERM)
    if state.has_stopped:
        return sweep_in_place(state)
    actions: list[Action] = []
    if paused:
        actions.append(PauseRanks(generation, paused, reason))
    if others:
        actions += [SignalRanks(SIGTERM, others), AbortGroups(generation, reason, others)]
    if state.accused:
        actions.append(StartGrace(generation, Grace.OF_ACCUSED))
    return state, (*actions, StartGrace(generation))


def sweep_in_place(state: Supervision) -> Step:
    """Sweep when no rank runs, and once only: the zygote may start new ranks after the first sweep."""
    if not state.in_place or state.is_sweeping or not state.has_stopped:
        return state, ()
    return replace(state, is_sweeping=True), (sweep(state),)


def stop_after_all(state: Supervision) -> Step:
    """End all ranks: the stop was in place, and its ranks have no place any more."""
    if not state.in_place:
        return state, ()
    state = replace(state, in_place=False, is_sweeping=False)
    return signal_ranks(state) if state.live else (state, ())
