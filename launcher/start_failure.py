"""The agent's steps when no rank of its node can start, or when its zygote is lost. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.exchange import OpenStore, Send, Sweep
from launcher.supervised import Phase
from rendezvous.values.events import AgentStopped, RankFailed
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from launcher.exchange import Action, StoreLost, ZygoteReplaced
    from launcher.supervised import Step, Supervision
    from rendezvous.values.types import Assignment

_TRY_AGAIN = 75


def failed_for(
    state: Supervision, assignment: Assignment, reason: str, failure: FailureClass, exit_code: int
) -> Action:
    """Report a failure of the node that no rank can report, as a failure of its first rank."""
    cause = Cause(state.agent.node, assignment.rank_offset, 0, failure, reason, exit_code)
    return Send(RankFailed(state.agent, assignment.generation, cause))


def cannot_start(
    state: Supervision, assignment: Assignment, reason: str, failure: FailureClass, exit_code: int
) -> Step:
    """Report the failure, and that the node has stopped: the service may ignore the failure, but must not wait."""
    report = failed_for(state, assignment, reason, failure, exit_code)
    stopped = Send(AgentStopped(state.agent, assignment.generation))
    return replace(state, over=True), (report, stopped)


def store_lost(state: Supervision, fact: StoreLost) -> Step:
    """Fail the attempt at once: ranks that connect later would wait for the store for as long as its timeout."""
    mine = state.assignment
    if mine is None or fact.generation != state.generation or state.over:
        return state, ()
    if state.phase is Phase.RUNNING:
        return state, (failed_for(state, mine, fact.reason, FailureClass.NETWORK, _TRY_AGAIN),)
    return cannot_start(state, mine, fact.reason, FailureClass.NETWORK, _TRY_AGAIN)


def zygote_replaced(state: Supervision, fact: ZygoteReplaced) -> Step:
    match state.phase:
        case Phase.JOINING if state.assignment is not None and state.assignment.node_rank == 0:
            return _store_lost_with_zygote(state, state.assignment, fact)
        case Phase.STOPPING if not state.live:
            return state, (Sweep(state.generation),)
        case _:
            return state, ()


def _store_lost_with_zygote(state: Supervision, assignment: Assignment, fact: ZygoteReplaced) -> Step:
    """Fail the attempt if the store's address is already known: ranks would wait for that store without success."""
    if state.over:
        return state, ()
    if not state.store_told:
        return state, (OpenStore(assignment.generation),)
    return cannot_start(state, assignment, fact.reason, FailureClass.SIGNAL, fact.exit_code)
