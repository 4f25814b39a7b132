"""From a failure, a loss or an order to the stop of a generation and the next decision.

The service sends the stop order to all nodes, and then waits for their answers. Each node answers after it has reaped
its ranks. The service does not wait for a node that is lost, or that has not answered within the stop budget. Then it
seals the next generation from the nodes that are left, or waits for a replacement, or ends the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rendezvous.diagnosing.diagnosis import explained
from rendezvous.diagnosing.stragglers import nodes_to_exclude
from rendezvous.rounds import healing, policy
from rendezvous.rounds.policy import (
    Verdict,
    as_consequence,
    counts_against_node,
    decide,
    decide_again,
    first_cause_order,
    first_of,
    is_ignored,
    next_streak,
    plan_restart,
)
from rendezvous.rounds.sealing import (
    aborted,
    choose,
    end,
    failed,
    gather,
    looped,
    noted,
    seal,
    target_nodes,
    waiting,
)
from rendezvous.values.cause_text import counted
from rendezvous.values.events import AgentStopped, Effect, Notice, Persist, Stop, Tell
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.job_state import (
    FAILURES_KEPT,
    Exclusion,
    JobState,
    Member,
    Phase,
    Result,
    Timers,
    by_arrival,
    spec_of,
    world_of,
)
from rendezvous.values.types import (
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    Outcome,
    StragglerPolicy,
)

# --- reports -----------------------------------------------------------------------------------------


def rank_failed(state: JobState, cause: Cause, now: float) -> Result:
    """Handle the failure of a rank. The sender is a member of the current world, and `cause.rank` is its own."""
    known = state.causes.get(cause.rank)
    if known is not None and first_cause_order(known) <= first_cause_order(cause):
        return state, ()
    state = replace(state, causes=state.causes.plus(cause.rank, cause))
    if state.phase is Phase.STOPPING:
        return state, ()
    if world_of(state).size > 1 and not is_ignored(state, cause):
        cause = as_consequence(cause)  # until all reports are here
    return _carry_out(state, decide(state, cause, now), now)


def _carry_out(state: JobState, verdict: Verdict, now: float) -> Result:
    decision = verdict.decision
    if decision.kind is DecisionKind.IGNORE:
        assert decision.cause is not None
        state = noted(state, decision)
        state = _without_pending_if_no_rank_is_left(state, decision.cause)
        state, effects = finish_if_all_did(state)
        return state, (*effects[:1], *_notify_its_node(state, decision), *effects[1:])
    if verdict.exclude is not None:
        state = exclude(state, verdict.exclude, verdict.exclude_reason, now)
    if decision.kind is not DecisionKind.FAIL:
        state = healing.counted(state, decision, now)
    return order_stop(state, decision, now)


def _notify_its_node(state: JobState, decision: Decision) -> tuple[Effect, ...]:
    """Notify only the node of an ignored failure, not all nodes: many ranks may have the same failure."""
    assert decision.cause is not None
    member = state.members.get(decision.cause.node)
    return () if member is None else (Tell(member.agent, Notice(state.generation, decision.reason)),)


def _without_pending_if_no_rank_is_left(state: JobState, cause: Cause) -> JobState:
    """A node is not pending any more if all its ranks failed and the policy ignored the failures."""
    member = state.members.get(cause.node)
    if member is None or member.node_rank is None:
        return replace(state, pending=state.pending.minus(cause.node))
    first = world_of(state).placements[member.node_rank].rank_offset
    if all(rank in state.causes for rank in range(first, first + member.facts.nproc)):
        return replace(state, pending=state.pending.minus(cause.node))
    return state


def stopped_unasked(state: JobState, member: Member, now: float) -> Result:
    """A node reaped its ranks without a stop order. If the policy ignored their failures, the node has finished."""
    place = world_of(state).placements[member.node_rank or 0]
    ranks = range(place.rank_offset, place.rank_offset + member.facts.nproc)
    if any(rank in state.causes for rank in ranks):
        return finish_if_all_did(replace(state, pending=state.pending.minus(member.agent.node)))
    return _end_world(
        state, [member], "stopped its ranks without a stop order (see the log of its agent)", now, left=False
    )


def finish_if_all_did(state: JobState) -> Result:
    if len(state.pending):
        return state, (Persist(),)
    outcome = Outcome(True, "all ranks finished", 0, restarts=state.restarts_used)
    return end(state, outcome, Decision(DecisionKind.FINISH, outcome.reason, state.generation))


# --- losses ------------------------------------------------------------------------------------------


def after_loss(
    state: JobState, gone: Sequence[Member], reason: str, now: float, *, left: bool = False
) -> Result:
    """Decide what follows the loss of `gone`, which `forget` has removed. `left`: they left the job by themselves."""
    working = [m for m in gone if m.node_rank is not None and m.agent.node in state.pending]
    for member in gone:
        state = _no_longer_pending(state, member.agent.node)
    match state.phase:
        case Phase.FORMING:
            if state.generation == 0 and not len(state.members):
                # No member with this spec is left: the next agent may have another spec.
                timers = Timers(readmit_at=state.timers.readmit_at)
                blank = JobState(excluded=state.excluded, retired=state.retired, timers=timers)
                return replace(blank, deadline_at=state.deadline_at), ()
            return gather(state, now)
        case Phase.SEALED | Phase.RUNNING if working:
            return _end_world(state, working, reason, now, left=left)
        case Phase.STOPPING:
            for member in working:
                state = _with_cause(state, _loss(state, member, reason))
            return conclude(state, now) if not len(state.pending) else (state, ())
        case Phase.RUNNING if any(m.node_rank is not None for m in gone):
            names = ", ".join(m.agent.node for m in gone if m.node_rank is not None)
            done = f"node {names} {reason}, after all its ranks had finished"
            return noted(state, Decision(DecisionKind.IGNORE, done, state.generation)), (Persist(),)
    return state, ()


def _no_longer_pending(state: JobState, node: str) -> JobState:
    return replace(state, pending=state.pending.minus(node)) if node in state.pending else state


def _end_world(state: JobState, lost: Sequence[Member], reason: str, now: float, *, left: bool) -> Result:
    causes = [_loss(state, m, reason) for m in lost]
    for cause in causes:
        state = _with_cause(state, cause)
    first = first_of(state, causes)
    plan = plan_restart(state, in_place=not healing.obstacle_to_order(state))
    if left and plan.kind in (DecisionKind.SHRINK, DecisionKind.RESTART_WITH_SPARE):
        # A graceful leave is not a failure if enough nodes remain. It does not use the restart budget.
        return order_stop(state, plan.decision(f"{first.reason}; {plan.words}", state.generation), now)
    return _carry_out(state, decide(state, first, now), now)


def _loss(state: JobState, member: Member, reason: str) -> Cause:
    assert member.node_rank is not None
    rank = world_of(state).placements[member.node_rank].rank_offset
    node = member.agent.node
    return Cause(node, rank, 0, FailureClass.NODE_LOST, f"node {node} {reason}", 1)


def _with_cause(state: JobState, cause: Cause) -> JobState:
    known = state.causes.get(cause.rank)
    if known is not None and first_cause_order(known) <= first_cause_order(cause):
        return state
    return replace(state, causes=state.causes.plus(cause.rank, cause))


# --- the stop ----------------------------------------------------------------------------------------


def order_stop(state: JobState, decision: Decision, now: float) -> Result:
    nodes = sorted((m.node_rank, m.agent) for m in state.members.values() if m.node_rank is not None)
    # After a takeover, a large job has leases of the future: an agent that connects only then needs its time to stop.
    told_at = max((state.leases.get(agent.node, now) for _, agent in nodes), default=now)
    state = replace(
        noted(state, decision),
        phase=Phase.STOPPING,
        decision=decision,
        pending=FrozenMap((agent.node, True) for _, agent in nodes),
        checkpoints_due=EMPTY,
        parked=EMPTY,
        examination=None,
        last_seen=EMPTY,
        reached=EMPTY,
        timers=replace(
            state.timers,
            examine_at=None,
            stop_by=max(now, told_at) + spec_of(state).stop_budget_s,
            give_up_at=None,
            settle_at=None,
            settle_bound_at=None,
        ),
    )
    order = Stop(state.generation, decision)
    effects: tuple[Effect, ...] = (Persist(), *(Tell(agent, order) for _, agent in nodes))
    if nodes:
        return state, effects
    state, more = conclude(state, now)
    return state, (*effects, *more)


def node_stopped(state: JobState, event: AgentStopped, now: float) -> Result:
    """Handle the answer of a node. The same answer may come again, with fewer paused ranks."""
    node = event.agent.node
    if node not in state.pending:
        return healing.fewer_parked(state, node, event.parked), ()
    state = replace(healing.parked(state, node, event.parked), pending=state.pending.minus(node))
    if event.reports:
        state = replace(state, last_seen=state.last_seen.plus(node, event.reports))
    if event.reached is not None:
        state = replace(state, reached=state.reached.plus(node, event.reached))
    if event.saved is not None:
        others = state.saved if state.saved_in == state.generation else EMPTY
        state = replace(state, saved=others.plus(node, event.saved), saved_in=state.generation)
    return conclude(state, now) if not len(state.pending) else (state, ())


def _without_stale_path(state: JobState) -> JobState:
    """Forget what an earlier generation has saved if this one has saved nothing, and may have finished steps.

    The script may have newer checkpoints of its own.
    """
    steps = [reached.step for reached in state.reached.values()]
    if state.saved_in == state.generation or (steps and not any(steps)):
        return state
    return replace(state, saved=EMPTY)


def conclude(state: JobState, now: float) -> Result:
    """Decide what follows a stop. All ranks of the generation are reaped, and all reports have arrived."""
    state, decision = _without_stale_path(state), state.decision
    assert decision is not None
    if decision.cause is None:  # not a failure: an order, a graceful leave, or growth
        state = replace(state, standstill=policy.standstill_after_order(state))
        return aborted(state, decision) if decision.kind is DecisionKind.FAIL else _regroup(state, now)
    first = first_of(state, state.causes.values())
    if (named := explained(first, state.causes, state.last_seen, world_of(state))) is not None:
        first, state = named, replace(state, causes=state.causes.plus(named.rank, named))
    state = _with_consequences(state, first)
    again = decide_again(state, first, now) if decision.kind is not DecisionKind.FAIL else None
    final = decision if again is None else again.decision
    state = _recorded(state, first)
    if again is not None:
        state = _counted_again(state, decision, final, now)
        if again.exclude is not None:
            state = exclude(state, again.exclude, again.exclude_reason, now)
        state = replace(noted(state, final), decision=final)
    if final.kind is DecisionKind.FAIL:
        outcome = failed(state, final.reason, first)
        return end(state, looped(outcome) if final.is_crash_loop else outcome)
    return _regroup(state, now)


def _with_consequences(state: JobState, first: Cause) -> JobState:
    """Ranks that have lost a connection after the first cause are consequences of it."""
    if first.failure is FailureClass.CONSEQUENCE:
        return state
    causes = (
        (rank, cause if cause is first else as_consequence(cause)) for rank, cause in state.causes.items()
    )
    return replace(state, causes=FrozenMap(causes))


def _counted_again(state: JobState, sent: Decision, final: Decision, now: float) -> JobState:
    """The restart or heal that was ordered with the stop was counted. Count what takes place instead."""
    if final.kind is DecisionKind.FAIL:
        return healing.uncounted(state, sent)
    return healing.recounted(state, now) if sent.in_place and not final.in_place else state


def _failure_noted(state: JobState, first: Cause) -> JobState:
    return replace(state, failures=(*state.failures, (state.generation, first))[-FAILURES_KEPT:])


def _recorded(state: JobState, first: Cause) -> JobState:
    state = replace(
        _failure_noted(state, first),
        streak=next_streak(state, first),
        standstill=policy.standstill_after_failure(state, first),
    )
    if not counts_against_node(first):
        return state
    count = state.node_failures.get(first.node, 0) + 1
    return replace(state, node_failures=state.node_failures.plus(first.node, count))


def _regroup(state: JobState, now: float) -> Result:
    decision = state.decision
    assert decision is not None
    state = replace(
        state,
        phase=Phase.FORMING,
        members=FrozenMap((n, replace(m, node_rank=None)) for n, m in state.members.items()),
        pending=EMPTY,
        timers=replace(state.timers, stop_by=None, give_up_at=now + spec_of(state).replacement_timeout_s),
    )
    state = healing.stopped(without_unfit_and_slow(state, now))
    here, enough = choose(state), spec_of(state).shrink_after_s
    if len(here) >= state.min_nodes and (not enough or len(here) >= target_nodes(state)):
        return seal(state, now)
    if len(here) >= state.min_nodes:
        until = now + enough
        state = replace(state, timers=replace(state.timers, settle_at=until, settle_bound_at=until))
    elif decision.kind is not DecisionKind.WAIT:
        are = "is" if len(here) == 1 else "are"
        left = f"{counted(len(here), 'node')} {are} left"
        reason = f"{left}, and at least {state.min_nodes} are needed; waiting for a replacement"
        decision = replace(decision, kind=DecisionKind.WAIT, reason=reason)
        state = replace(noted(state, decision), decision=decision)
    return state, (Persist(), *(Tell(m.agent, waiting(state, m)) for m in by_arrival(state)))


# --- the end -----------------------------------------------------------------------------------------


def abort(state: JobState, reason: str, now: float) -> Result:
    decision = Decision(DecisionKind.FAIL, f"aborted by an operator: {reason}", state.generation)
    match state.phase:
        case Phase.ENDED:
            return state, ()
        case Phase.STOPPING if state.decision is not None and state.decision.kind is DecisionKind.FAIL:
            return state, ()  # the job already ends, for the reason in the stop order
        case Phase.FORMING:
            return aborted(noted(state, decision), decision)
        case Phase.STOPPING:
            return replace(noted(state, decision), decision=decision), (Persist(),)
        case Phase.SEALED | Phase.RUNNING:
            return order_stop(state, decision, now)


def interrupt(state: JobState, member: Member, reason: str, now: float) -> Result:
    """End the job: a person has interrupted it on this node of the world, which `forget` has removed."""
    state = _no_longer_pending(state, member.agent.node)
    words = f"{reason} on {member.agent.node}"
    decision = Decision(DecisionKind.FAIL, words, state.generation, is_interrupt=True)
    if state.phase is not Phase.STOPPING:
        return order_stop(state, decision, now)
    if state.decision is None or state.decision.kind is not DecisionKind.FAIL:
        state = replace(noted(state, decision), decision=decision)
    return conclude(state, now) if not len(state.pending) else (state, (Persist(),))


# --- exclusion: which nodes stay out of the next worlds for a time, because they are unfit, slow, or fail


def without_unfit_and_slow(state: JobState, now: float) -> JobState:
    return _without_stragglers(_without_unfit(state, now), now)


def _without_unfit(state: JobState, now: float) -> JobState:
    """As long as enough nodes remain: a job that needs all its nodes continues with them."""
    here = [node for node in state.members if node not in state.excluded]
    for node in [node for node in here if node in state.unfit][: max(0, len(here) - state.min_nodes)]:
        state = exclude(state, node, f"it is unfit: {state.unfit[node]}", now, for_health=True)
    return state


def _without_stragglers(state: JobState, now: float) -> JobState:
    if spec_of(state).stragglers.policy is not StragglerPolicy.EXCLUDE:
        return state
    here = [node for node in state.members if node not in state.excluded]
    for node, reason in nodes_to_exclude(state.straggler_state, here, state.min_nodes).items():
        state = exclude(state, node, reason, now)
    return state


def exclude(state: JobState, node: str, reason: str, now: float, *, for_health: bool = False) -> JobState:
    until = now + spec_of(state).node_cooldown_s
    exclusion = Exclusion(
        f"{reason}; the node is admitted again after {spec_of(state).node_cooldown_s:g} s", until, for_health
    )
    soonest = until if state.timers.readmit_at is None else min(until, state.timers.readmit_at)
    return replace(
        state,
        excluded=state.excluded.plus(node, exclusion),
        timers=replace(state.timers, readmit_at=soonest),
    )
