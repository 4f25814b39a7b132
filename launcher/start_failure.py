"""The agent's steps when no rank of its node can start, or when its zygote is lost. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.exchange import OpenStore, Send
from launcher.pausing import answer
from launcher.stop_sequence import sweep
from launcher.supervised import Phase
from rendezvous.values.events import RankFailed
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from launcher.exchange import Action, StoreLost, ZygoteReplaced
    from launcher.supervised import Step, Supervision
    from rendezvous.values.types import Assignment

TRY_AGAIN = 75


def failed_for(
    state: Supervision, assignment: Assignment, reason: str, failure: FailureClass, exit_code: int
) -> Action:
    """Report a failure of the node as the failure of its first rank, because no rank is running."""
    cause = Cause(state.agent.node, assignment.rank_offset, 0, failure, reason, exit_code)
    return Send(RankFailed(state.agent, assignment.generation, cause))


def cannot_start(
    state: Supervision, assignment: Assignment, reason: str, failure: FailureClass, exit_code: int
) -> Step:
    """Report the failure, and that the node has stopped.

    The service may ignore the failure, but must not wait for the ranks of this node.
    """
    report = failed_for(state, assignment, reason, failure, exit_code)
    state, stopped = answer(replace(state, last_seen=()), assignment.generation)
    return replace(state, over=True), (report, *stopped)


def store_lost(state: Supervision, event: StoreLost) -> Step:
    """Fail this generation at once: ranks that connect later would wait for the store until its timeout."""
    mine = state.assignment
    if mine is None or event.generation != state.generation or state.over:
        return state, ()
    if state.phase is Phase.RUNNING:
        return state, (failed_for(state, mine, event.reason, FailureClass.NETWORK, TRY_AGAIN),)
    return cannot_start(state, mine, event.reason, FailureClass.NETWORK, TRY_AGAIN)


def zygote_replaced(state: Supervision, event: ZygoteReplaced) -> Step:
    match state.phase:
        case Phase.JOINING if state.assignment is not None and state.assignment.node_rank == 0:
            return _store_lost_with_zygote(state, state.assignment, event)
        case Phase.STOPPING if not state.live:
            return state, (sweep(state),)
        case _:
            return state, ()


def _store_lost_with_zygote(state: Supervision, assignment: Assignment, event: ZygoteReplaced) -> Step:
    """Fail this generation if other nodes have the store's address: their ranks would wait for the lost store."""
    if state.over:
        return state, ()
    if not state.store_told:
        return state, (OpenStore(assignment.generation),)
    return cannot_start(state, assignment, event.reason, FailureClass.SIGNAL, event.exit_code)
