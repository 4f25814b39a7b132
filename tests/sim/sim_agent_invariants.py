"""What must hold for every single step of an agent's machine, whatever led there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_violation import require

from launcher.exchange import (
    AbortGroups,
    AgentPhase,
    AskCheckpoint,
    CheckpointOver,
    Finish,
    GraceOver,
    RankEnded,
    Send,
    SignalRanks,
    StartRanks,
    StoreFailed,
    StoreListens,
    StoreReached,
    Sweep,
    Swept,
)
from launcher.supervision import SIGKILL
from rendezvous.values.events import (
    Accused,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    Ended,
    Examined,
    RankFailed,
    Stop,
    StoreAt,
)

if TYPE_CHECKING:
    from launcher.exchange import Action, AgentEvent, Supervision

_ORDERS = (StoreAt, Stop, CheckpointRequested, Accused)
_FACTS = (StoreListens, StoreFailed, StoreReached, RankEnded, Swept, GraceOver, CheckpointOver)
_NEEDS_RANKS = (AskCheckpoint, AbortGroups)


def check_agent_step(
    before: Supervision, fact: AgentEvent, after: Supervision, actions: tuple[Action, ...]
) -> None:
    require(before.phase is not AgentPhase.DONE, "a step after the end")
    _fenced(before, fact, after, actions)
    _ranks_follow_the_phase(before, after, actions)
    if any(isinstance(a, Finish) for a in actions):
        require(after.phase is AgentPhase.DONE, "it finishes and goes on")
    if isinstance(fact, RankEnded) and fact.cause is not None and fact.local_rank in before.live:
        kind = AgentStopped if before.phase is AgentPhase.JOINING and before.over else RankFailed
        reported = any(isinstance(a, Send) and isinstance(a.message, kind) for a in actions)
        require(reported or fact.generation != before.generation, "a failure is not reported")
    if isinstance(fact, Ended) and before.finish is None:
        require(after.finish is not None, "the end is not taken note of")
        assert after.finish is not None
        require(after.finish.exit_code == fact.outcome.exit_code, "another exit code than the job's")


def _fenced(before: Supervision, fact: AgentEvent, after: Supervision, actions: tuple[Action, ...]) -> None:
    """A stale order or fact changes nothing."""
    if isinstance(fact, Assigned):
        stale = fact.assignment.generation <= before.generation
    elif isinstance(fact, RankEnded) and fact.local_rank in before.parked:
        return  # it is older than the assignment that it was to continue in
    elif isinstance(fact, (*_ORDERS, *_FACTS)):
        stale = fact.generation < before.generation
    else:
        return
    if stale:
        told = all(isinstance(a, Send) and isinstance(a.message, Examined) for a in actions)
        require(after == before and told, f"{fact} counted in generation {before.generation}")


def _ranks_follow_the_phase(before: Supervision, after: Supervision, actions: tuple[Action, ...]) -> None:
    for action in actions:
        match action:
            case StartRanks(assignment):
                joining = before.phase is AgentPhase.JOINING and after.phase is AgentPhase.RUNNING
                require(joining, f"ranks start from {before.phase}")
                require(
                    assignment == after.assignment, "ranks start with an assignment of another generation"
                )
            case Sweep(generation):
                require(after.phase is AgentPhase.STOPPING, f"a sweep while {after.phase}")
                require(set(after.live) <= set(after.parked), "a sweep while ranks run")
                require(generation == after.generation, "a sweep of another generation")
            case Send(AgentStopped(parked=parked)):
                require(after.live == after.parked == parked, "it answers a stop while ranks run")
            case SignalRanks(_, only) if after.in_place:
                require(not set(only or after.live) & set(after.parked), f"{action} to ranks that stay")
            case SignalRanks(signum) if signum != SIGKILL:
                require(bool(after.live), f"{action} with no rank")
            case _ if isinstance(action, _NEEDS_RANKS):
                require(bool(before.live or after.live), f"{action} with no rank")
    if after.phase in (AgentPhase.JOINING, AgentPhase.DONE):
        require(after.live == after.parked, f"ranks run while {after.phase}")
    require(after.phase is not AgentPhase.DONE or not after.live, "ranks live at the end")
