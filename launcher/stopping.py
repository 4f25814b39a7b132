"""Begins the stop of a node's ranks: by an order, by a signal, or because the job continues without the node.

Pure; steps of launcher/supervision.py. A stop that has begun in place becomes a stop of all ranks if something happens
that leaves the parked ranks no place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.exchange import Finish, Send
from launcher.health.hang_inquiry import before_a_stop, why
from launcher.pausing import answer, pause_ranks, stop_after_all
from launcher.stop_sequence import SIGINT, hurry, signal_ranks, sweep
from launcher.supervised import Phase
from rendezvous.values.events import AgentLeft
from rendezvous.values.types import DecisionKind

if TYPE_CHECKING:
    from launcher.exchange import StopRequested
    from launcher.supervised import Step, Supervision
    from rendezvous.values.events import AgentJoined
    from rendezvous.values.types import Decision


def stop(state: Supervision, generation: int, decision: Decision) -> Step:
    """The order of the service. It may come twice, the second time with another decision."""
    if generation > state.generation and state.join is not None:  # it ended while this node was disconnected
        return _stop_missed(state, generation, decision, state.join)
    if generation != state.generation:
        return state, ()
    state = replace(state, job_failed=decision.kind is DecisionKind.FAIL)
    state = replace(state, is_interrupted=state.is_interrupted or decision.is_interrupt)
    if state.phase is Phase.STOPPING:
        return (state, ()) if decision.in_place else stop_after_all(state)
    if state.phase is Phase.JOINING and state.over and state.live and decision.in_place:
        return answer(state, generation)  # again: its ranks are parked, and nothing else is left
    # In Joining, the generation was stopped before its ranks started. Its store may already run.
    first = before_a_stop(state, decision)
    state, actions = begin_stopping(state, decision)
    return state, (*first, *actions)


def _stop_missed(state: Supervision, generation: int, decision: Decision, join: AgentJoined) -> Step:
    if state.phase is not Phase.JOINING or (state.live and not decision.in_place):
        return given_up(state, join)
    return answer(replace(state, missed=generation, last_seen=()), generation)


def begin_stopping(state: Supervision, decision: Decision | None = None) -> Step:
    if state.preempted is not None:  # the scheduler takes this node anyway
        signum, name = state.preempted.signum, state.preempted.name
        state = replace(state, preempted=None, is_interrupted=signum == SIGINT)
        return leave(state, f"stopped by {name}", 128 + signum)
    state = replace(state, phase=Phase.STOPPING, over=True, checkpoint="")
    if decision is not None and decision.in_place:
        return pause_ranks(state, why(decision))
    if not state.live:
        return state, (sweep(state),)
    return signal_ranks(state)


def given_up(state: Supervision, join: AgentJoined) -> Step:
    """The service has declared this node lost, and may have replaced it: stop its ranks."""
    if state.phase is Phase.JOINING and not state.live:
        return state, (Send(join),)
    state = replace(state, rejoins=True, overtaken_by=None)
    return stop_after_all(state) if state.phase is Phase.STOPPING else begin_stopping(state)


def finish(state: Supervision, action: Finish) -> Step:
    """The first reason decides the exit code: after a stop signal, the agent exits with the code of that signal."""
    if state.finish is None:
        state = replace(state, finish=action)
    assert state.finish is not None
    if state.phase is Phase.STOPPING:
        return stop_after_all(state)
    if state.phase is Phase.JOINING and not state.live:
        return replace(state, phase=Phase.DONE), (state.finish,)
    return begin_stopping(state)


def stop_requested(state: Supervision, event: StopRequested) -> Step:
    # The interrupt of another node is not the first signal of this one: people type Ctrl-C on all nodes at once.
    is_repeated = state.finish is not None or (state.job_failed and not state.is_interrupted)
    if state.phase is Phase.STOPPING and is_repeated:
        return hurry(state)
    state = replace(state, preempted=None, is_interrupted=event.signum == SIGINT)
    return leave(state, f"stopped by {event.name}", 128 + event.signum)


def leave(state: Supervision, reason: str, exit_code: int) -> Step:
    """Leave the job because of a local decision: notify the service first, and do not wait for its reply."""
    state, actions = finish(state, Finish(exit_code, reason))
    return state, (Send(AgentLeft(state.agent, reason, state.is_interrupted)), *actions)
