"""From a failure, a loss or an order to the stop of a generation and the next decision.

The service sends the stop order to all nodes, and then waits for their answers. Each node answers after it has reaped
its ranks. The service does not wait for a node that is lost, or that has not answered within the stop budget. Then it
seals the next generation from the nodes that are left, or waits for a replacement, or ends the job.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing.post_mortem import explained
from rendezvous.diagnosing.stragglers import nodes_to_exclude
from rendezvous.rounds.policy import (
    counts_against_node,
    decide,
    decide_again,
    first_cause_order,
    first_of,
    next_streak,
    plan_restart,
)
from rendezvous.rounds.sealing import (
    Result,
    by_arrival,
    choose,
    gather,
    seal,
    spec_of,
    target_nodes,
    waiting,
    world_of,
)
from rendezvous.values.events import Ended, Notice, Persist, Stop, Tell
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.state import (
    DECISIONS_KEPT,
    FAILURES_KEPT,
    MAX_CAUSES,
    Exclusion,
    JobState,
    Member,
    Phase,
    Timers,
)
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass, Outcome, StragglerPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.rounds.policy import Verdict
    from rendezvous.values.events import Effect
    from rendezvous.values.rank_report import RankReport

ABORTED_EXIT_CODE = 143  # as if the operator had sent SIGTERM
INTERRUPTED_EXIT_CODE = 130
TRY_AGAIN_EXIT_CODE = 75


# --- reports -----------------------------------------------------------------------------------------


def rank_failed(state: JobState, cause: Cause, now: float) -> Result:
    """Handle the failure of a rank. The sender is a member of the current world, and `cause.rank` is its own."""
    known = state.causes.get(cause.rank)
    if known is not None and first_cause_order(known) <= first_cause_order(cause):
        return state, ()
    state = replace(state, causes=state.causes.plus(cause.rank, cause))
    if state.phase is Phase.STOPPING:
        return state, ()
    return _carry_out(state, decide(state, cause, now), now)


def _carry_out(state: JobState, verdict: Verdict, now: float) -> Result:
    decision = verdict.decision
    if decision.kind is DecisionKind.IGNORE:
        assert decision.cause is not None
        state = _noted(state, decision)
        state = _without_pending_if_no_rank_is_left(state, decision.cause)
        state, effects = finish_if_all_did(state)
        return state, (*effects[:1], *_notify_its_node(state, decision), *effects[1:])
    if verdict.exclude is not None:
        state = exclude(state, verdict.exclude, verdict.exclude_reason, now)
    if decision.kind is not DecisionKind.FAIL:
        kept = max(1, spec_of(state).budget.limit)
        state = replace(
            state, restarts_used=state.restarts_used + 1, restart_times=(*state.restart_times, now)[-kept:]
        )
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
            return _thinned(state, now)
        case Phase.SEALED | Phase.RUNNING if working:
            return _end_world(state, working, reason, now, left=left)
        case Phase.STOPPING:
            for member in working:
                state = _with_cause(state, _loss(state, member, reason))
            return conclude(state, now) if not len(state.pending) else (state, ())
        case Phase.RUNNING if any(m.node_rank is not None for m in gone):
            names = ", ".join(m.agent.node for m in gone if m.node_rank is not None)
            done = f"node {names} {reason}, after all its ranks had finished"
            return _noted(state, Decision(DecisionKind.IGNORE, done, state.generation)), (Persist(),)
    return state, ()


def _no_longer_pending(state: JobState, node: str) -> JobState:
    return replace(state, pending=state.pending.minus(node)) if node in state.pending else state


def _thinned(state: JobState, now: float) -> Result:
    if state.generation == 0 and not len(state.members):
        # No member with this spec is left: the next agent may have another spec.
        timers = Timers(readmit_at=state.timers.readmit_at)
        blank = JobState(excluded=state.excluded, retired=state.retired, timers=timers)
        return replace(blank, deadline_at=state.deadline_at), ()
    return gather(state, now)


def _end_world(state: JobState, lost: Sequence[Member], reason: str, now: float, *, left: bool) -> Result:
    causes = [_loss(state, m, reason) for m in lost]
    for cause in causes:
        state = _with_cause(state, cause)
    first = first_of(state, causes)
    plan = plan_restart(state)
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
    state = replace(
        _noted(state, decision),
        phase=Phase.STOPPING,
        decision=decision,
        pending=FrozenMap((agent.node, True) for _, agent in nodes),
        checkpoints_due=EMPTY,
        examination=None,
        last_seen=EMPTY,
        timers=replace(
            state.timers,
            examine_at=None,
            stop_by=now + spec_of(state).stop_budget_s,
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


def node_stopped(state: JobState, node: str, reports: tuple[RankReport, ...], now: float) -> Result:
    state = replace(state, pending=state.pending.minus(node))
    if reports:
        state = replace(state, last_seen=state.last_seen.plus(node, reports))
    return conclude(state, now) if not len(state.pending) else (state, ())


def conclude(state: JobState, now: float) -> Result:
    """Decide what follows a stop. All ranks of the generation are reaped, and all reports have arrived."""
    decision = state.decision
    assert decision is not None
    if decision.cause is None:  # not a failure: an order, a graceful leave, or growth
        return _aborted(state, decision) if decision.kind is DecisionKind.FAIL else _regroup(state, now)
    first = first_of(state, state.causes.values())
    if (named := explained(first, state.causes, state.last_seen, world_of(state))) is not None:
        first, state = named, replace(state, causes=state.causes.plus(named.rank, named))
    final = decision
    again = decide_again(state, first, now) if decision.kind is not DecisionKind.FAIL else None
    state = _recorded(state, first)
    if again is not None:
        final = again.decision
        if again.exclude is not None:
            state = exclude(state, again.exclude, again.exclude_reason, now)
        state = replace(_noted(state, final), decision=final)
    if final.kind is DecisionKind.FAIL:
        return end(state, _failed(state, final.reason, first))
    return _regroup(state, now)


def _recorded(state: JobState, first: Cause) -> JobState:
    failures = (*state.failures, (state.generation, first))[-FAILURES_KEPT:]
    state = replace(state, failures=failures, streak=next_streak(state, first))
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
    state = _without_stragglers(_without_unfit(state, now), now)
    here, enough = choose(state), spec_of(state).shrink_after_s
    if len(here) >= state.min_nodes and (not enough or len(here) >= target_nodes(state)):
        return seal(state, now)
    if len(here) >= state.min_nodes:
        until = now + enough
        state = replace(state, timers=replace(state.timers, settle_at=until, settle_bound_at=until))
    elif decision.kind is not DecisionKind.WAIT:
        reason = f"{len(here)} nodes are left, and at least {state.min_nodes} are needed; waiting for a replacement"
        decision = replace(decision, kind=DecisionKind.WAIT, reason=reason)
        state = replace(_noted(state, decision), decision=decision)
    return state, (Persist(), *(Tell(m.agent, waiting(state, m)) for m in by_arrival(state)))


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


# --- the end -----------------------------------------------------------------------------------------


def end_incomplete_round(state: JobState) -> Result:
    """End the job: a forming round reached its timeout."""
    spec, names = (
        spec_of(state),
        [m.agent.node for m in by_arrival(state) if m.agent.node not in state.excluded],
    )
    who = f": {', '.join(names[:16])}{', ...' if len(names) > 16 else ''}" if names else ""
    out = "".join(f"; {n} is excluded: {x.reason}" for n, x in state.excluded.items() if n in state.members)
    cause = state.decision.cause if state.decision is not None else None
    if state.generation == 0:
        count = (
            f"only {len(names)} of {state.min_nodes} nodes joined within {spec.join_timeout_s:g} s{who}{out}"
        )
        reason = f"{count}. Start the other nodes, or increase --join-timeout"
    else:
        within = f"within {spec.replacement_timeout_s:g} s"
        count = f"no replacement joined {within}; {len(names)} of {state.min_nodes} nodes are left{who}{out}"
        reason = f"{count}. Start another node, or increase --replacement-timeout"
    if cause is not None:
        return end(
            state, _failed(state, reason, first_of(state, state.causes.values())), _fail(state, reason)
        )
    outcome = Outcome(False, reason, TRY_AGAIN_EXIT_CODE, restarts=state.restarts_used)
    return end(state, outcome, _fail(state, reason))


def _fail(state: JobState, reason: str) -> Decision:
    cause = state.decision.cause if state.decision is not None else None
    return Decision(DecisionKind.FAIL, reason, state.generation, cause)


def abort(state: JobState, reason: str, now: float) -> Result:
    decision = Decision(DecisionKind.FAIL, f"aborted by an operator: {reason}", state.generation)
    match state.phase:
        case Phase.ENDED:
            return state, ()
        case Phase.STOPPING if state.decision is not None and state.decision.kind is DecisionKind.FAIL:
            return state, ()  # the job already ends, for the reason in the stop order
        case Phase.FORMING:
            return _aborted(_noted(state, decision), decision)
        case Phase.STOPPING:
            return replace(_noted(state, decision), decision=decision), (Persist(),)
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
        state = replace(_noted(state, decision), decision=decision)
    return conclude(state, now) if not len(state.pending) else (state, (Persist(),))


def _aborted(state: JobState, decision: Decision) -> Result:
    causes = tuple(sorted(state.causes.values(), key=first_cause_order))[:MAX_CAUSES]
    code = INTERRUPTED_EXIT_CODE if decision.is_interrupt else ABORTED_EXIT_CODE
    return end(state, Outcome(False, decision.reason, code, None, causes, state.restarts_used))


def _failed(state: JobState, reason: str, first: Cause) -> Outcome:
    others = sorted((c for c in state.causes.values() if c is not first), key=first_cause_order)
    causes = (first, *others)[:MAX_CAUSES]
    return Outcome(False, reason, first.exit_code or 1, first, causes, state.restarts_used)


def end(state: JobState, outcome: Outcome, decision: Decision | None = None) -> Result:
    """End the job. `decision`: recorded first, if it is not recorded yet."""
    if decision is not None:
        state = _noted(state, decision)
    outcome = replace(outcome, decisions=state.decisions)
    state = replace(state, phase=Phase.ENDED, outcome=outcome, pending=EMPTY, timers=Timers(), store=None)
    state = replace(state, examination=None)
    return state, (Persist(), *(Tell(m.agent, Ended(outcome)) for m in by_arrival(state)))


def _noted(state: JobState, decision: Decision) -> JobState:
    return replace(state, decisions=(*state.decisions, decision)[-DECISIONS_KEPT:])
