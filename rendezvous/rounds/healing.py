"""Healing in place: whether ranks that survive keep their processes. Pure.

Theory of operation
-------------------
A heal is a restart in which the ranks that survive are paused and not reaped. Everything else is the same: the stop of
a generation, its answers, the seal, the number of the next generation, its TCPStore.

    HealReady        the live ranks of a node can be paused, because they train inside `State.run` of `ddp.elastic`
    Stop(in_place)   each agent pauses the ranks that can be paused, and reaps the others
    AgentStopped     names the ranks that are `parked`, which means paused
    Assigned         `in_place` if a node of the new world has parked ranks: they continue, and new ranks join them

A node that does not report in time, or that is lost, has no parked ranks. If no parked rank is left when the world is
sealed, the new generation is a plain restart. Nothing has to be undone for that.

The decision in place is made like any other (`policy.decide`), and again when all nodes have stopped: the true cause
may be a failure that is not healed in place, or no rank may be parked. Then it becomes a restart, and counts as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import (
    Cause,
    Decision,
    FailureClass,
    JobSpec,
    PolicyAction,
    Recover,
    RestartBudget,
)

NOBODY_IS_LEFT = "no paused rank is left"


# --- whether the next stop can be in place -------------------------------------------------------------


def obstacle_to_order(state: JobState) -> str:
    """Why a stop that no failure causes, such as growth, cannot be in place. Empty if it can."""
    return _obstacle_of_job(state) or _nobody_ready(state, None)


def obstacle(state: JobState, cause: Cause, rule: PolicyAction | None, without: str | None) -> str:
    """Why this failure cannot be healed in place; empty if it can. `rule`: the rule of --failure-policy, if any."""
    return _obstacle_of_job(state) or _obstacle_of_class(cause, rule) or _nobody_ready(state, without)


def obstacle_after_stop(state: JobState, first: Cause, rule: PolicyAction | None, without: str | None) -> str:
    """The same when all nodes have stopped, and `first` is the first cause."""
    if found := _obstacle_of_job(state) or _obstacle_of_class(first, rule):
        return found
    stay = (node for node in state.parked if node not in state.excluded and node != without)
    return "" if any(node in state.members for node in stay) else "no rank could be paused in time"


def _obstacle_of_job(state: JobState) -> str:
    assert state.spec is not None
    return "--recover is restart" if state.spec.recover is Recover.RESTART else state.refusal


def _obstacle_of_class(cause: Cause, rule: PolicyAction | None) -> str:
    if rule is PolicyAction.RESTART:
        return f"--failure-policy restarts all ranks on {cause.failure}"
    if cause.failure is FailureClass.USER_EXCEPTION and rule is not PolicyAction.HEAL:
        return "an exception of the script is healed in place only with --failure-policy user-exception=heal"
    return ""


def _nobody_ready(state: JobState, without: str | None) -> str:
    if not len(state.ready):
        return "no rank trains inside State.run of ddp.elastic"
    if any(_has_survivors(state, node) for node in state.ready if node != without):
        return ""
    return "no rank that can be paused is left"


def _has_survivors(state: JobState, node: str) -> bool:
    """Whether this node, which is ready, has a rank that has neither failed nor finished."""
    member = state.members.get(node)
    if member is None or member.node_rank is None or node in state.excluded or node not in state.pending:
        return False
    assert state.world is not None
    first = state.world.placements[member.node_rank].rank_offset
    local_ranks = range(member.facts.nproc)
    if state.phase is Phase.SEALED:  # its other ranks have not started
        return any(first + i not in state.causes for i in state.parked.get(node, ()))
    return any(first + i not in state.causes for i in local_ranks)


def mention(spec: JobSpec, why_not: str) -> str:
    """The part of a decision's reason that says why it is not in place, for those who have asked for it."""
    return f"not in place: {why_not}; " if spec.recover is Recover.IN_PLACE and why_not else ""


# --- paused ranks between two generations --------------------------------------------------------------


def parked(state: JobState, node: str, local_ranks: tuple[int, ...]) -> JobState:
    """Note which ranks of a node are paused. They count only if the stop is in place."""
    in_place = state.decision is not None and state.decision.in_place
    if not in_place or not local_ranks:
        return without_parked(state, node)
    return replace(state, parked=state.parked.plus(node, local_ranks))


def fewer_parked(state: JobState, node: str, local_ranks: tuple[int, ...]) -> JobState:
    """A node that has stopped reports again, because a paused rank has ended. A late copy of a report adds none."""
    known = state.parked.get(node, ())
    left = tuple(rank for rank in known if rank in local_ranks)
    return state if left == known else parked(state, node, left)


def without_parked(state: JobState, node: str) -> JobState:
    return replace(state, parked=state.parked.minus(node)) if node in state.parked else state


def stopped(state: JobState) -> JobState:
    """All nodes have stopped, and the final decision is made. Excluded nodes stop their paused ranks."""
    if state.decision is None or not state.decision.in_place or state.refusal:
        return replace(state, parked=EMPTY)
    for node in [node for node in state.parked if node in state.excluded]:
        state = without_parked(state, node)
    return state


def forgotten(state: JobState, node: str) -> JobState:
    """Remove a node that is lost or has left. What a world was formed with does not change any more."""
    state = replace(state, ready=state.ready.minus(node)) if node in state.ready else state
    return without_parked(state, node) if state.phase in (Phase.FORMING, Phase.STOPPING) else state


def lost_heal(state: JobState, nodes: Iterable[str]) -> Decision | None:
    """The decision in place that a world of these nodes cannot carry out, because none of them has paused ranks."""
    decision = state.decision
    if decision is None or not decision.in_place:
        return None
    return None if any(node in state.parked for node in nodes) else decision


def sealed(state: JobState, nodes: Iterable[str], now: float) -> JobState:
    """The state in which a world of these nodes is sealed. A decision in place without paused ranks is a restart."""
    stay = [node for node in nodes if node in state.parked]
    decision = lost_heal(state, stay)
    if decision is not None:
        if decision.cause is not None:
            state = recounted(state, now)
        reason = f"{decision.reason}; {NOBODY_IS_LEFT}: all ranks restart"
        plain = replace(decision, in_place=False, reason=reason)
        state = replace(state, decision=plain, decisions=(*state.decisions, plain))
    return replace(
        state,
        parked=FrozenMap((node, state.parked[node]) for node in stay),
        ready=FrozenMap((node, True) for node in stay),
    )


# --- counting --------------------------------------------------------------------------------------------


def counted(state: JobState, decision: Decision, now: float) -> JobState:
    """Count a decision after a failure: against --max-heals, or against --max-restarts."""
    assert state.spec is not None
    if decision.in_place:
        times = _times(state.spec.heal_budget, (*state.heal_times, now))
        return replace(state, heals_used=state.heals_used + 1, heal_times=times)
    times = _times(state.spec.budget, (*state.restart_times, now))
    return replace(state, restarts_used=state.restarts_used + 1, restart_times=times)


def recounted(state: JobState, now: float) -> JobState:
    """A heal that has become a restart counts as a restart."""
    state = _without_last_heal(state)
    assert state.spec is not None
    times = _times(state.spec.budget, (*state.restart_times, now))
    return replace(state, restarts_used=state.restarts_used + 1, restart_times=times)


def uncounted(state: JobState, decision: Decision) -> JobState:
    """The job ends instead: the restart or heal that was ordered with the stop does not take place."""
    if decision.in_place:
        return _without_last_heal(state)
    return replace(
        state, restarts_used=max(0, state.restarts_used - 1), restart_times=state.restart_times[:-1]
    )


def _without_last_heal(state: JobState) -> JobState:
    return replace(state, heals_used=max(0, state.heals_used - 1), heal_times=state.heal_times[:-1])


def _times(budget: RestartBudget, times: tuple[float, ...]) -> tuple[float, ...]:
    """The times that a budget needs: none if it has no window."""
    return () if budget.window_s is None else times[-max(1, budget.limit) :]
