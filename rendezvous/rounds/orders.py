"""What changes a running world without a failure: orders of operators, growth, and heals that are refused. Pure.

An order that restarts the world does not use the restart budget.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.rounds import healing
from rendezvous.rounds.healing import obstacle_to_order
from rendezvous.rounds.policy import growth, plan_restart, restarts_spent, room_to_grow
from rendezvous.rounds.sealing import checkpoint_request, gather, last_call, tell_progress
from rendezvous.rounds.stopping import order_stop
from rendezvous.values.events import Effect, HealReady, Notice, Persist, Tell
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.job_state import (
    Exclusion,
    JobState,
    Member,
    Phase,
    Result,
    is_live,
    spec_of,
    world_nodes,
    world_of,
)
from rendezvous.values.types import AgentId, Decision, DecisionKind, Recover, ScaleUp

DRAINED = "drained by an operator: "


def drain(state: JobState, node: str, reason: str, now: float) -> Result:
    exclusion = Exclusion(DRAINED + reason)
    if state.phase is Phase.ENDED or state.excluded.get(node) == exclusion:
        return state, ()
    member = state.members.get(node)
    state = replace(state, excluded=state.excluded.plus(node, exclusion))
    if state.phase is Phase.FORMING:
        state = healing.without_parked(state, node)
    if is_live(state) and member is not None and member.node_rank is not None:
        plan = plan_restart(state, in_place=not healing.obstacle_to_order(state))
        words = f"draining {node}: {reason}; {plan.words}"
        return order_stop(state, plan.decision(words, state.generation), now)
    return _reconsider(state, now)


def leave_out(state: JobState, agent: AgentId, reason: str, now: float) -> Result:
    """A rank asks to leave its node out: at once if enough nodes remain, otherwise at a restart when they do."""
    member = state.members.get(agent.node)
    if not is_live(state) or member is None or member.node_rank is None or agent.node in state.excluded:
        return state, ()
    in_place = not healing.obstacle_to_order(state)
    plan = plan_restart(state, without=agent.node, in_place=in_place)
    if plan.kind is DecisionKind.WAIT:
        words = f"no other node can take over from {agent.node}, so the job continues with it ({reason})"
        return state, (Tell(agent, Notice(state.generation, words)),)
    until_resumed = Exclusion(f"{reason} (`ddpctl resume` admits it again)")
    state = replace(state, excluded=state.excluded.plus(agent.node, until_resumed))
    return order_stop(
        state, plan.decision(f"{agent.node} is excluded: {reason}; {plan.words}", state.generation), now
    )


def resume_node(state: JobState, node: str, now: float) -> Result:
    if state.phase is Phase.ENDED or node not in state.excluded:
        return state, ()
    return readmit(state, [node], now)


def readmit(state: JobState, nodes: list[str], now: float) -> Result:
    excluded, failures = state.excluded, state.node_failures
    for node in nodes:
        excluded, failures = excluded.minus(node), failures.minus(node)
    state = replace(state, excluded=excluded, node_failures=failures)
    return _reconsider(state, now)


def _reconsider(state: JobState, now: float) -> Result:
    effects: tuple[Effect, ...] = ()
    if state.phase is Phase.FORMING and state.spec is not None:
        state, effects = gather(state, now)
        if state.phase is Phase.FORMING:  # send waiting agents the new reason and number at once
            state, effects = tell_progress(state)
    elif is_live(state):
        state, effects = consider_growth(state, now)
    return state, (Persist(), *effects)


def resize(state: JobState, min_nodes: int, max_nodes: int, now: float) -> Result:
    is_invalid = not 1 <= min_nodes <= max_nodes
    same = (min_nodes, max_nodes) == (state.min_nodes, state.max_nodes)
    if state.spec is None or state.phase is Phase.ENDED or is_invalid or same:
        return state, ()
    state = replace(state, min_nodes=min_nodes, max_nodes=max_nodes)
    asked = f"resized by an operator to {min_nodes}:{max_nodes}"
    if not is_live(state):
        return _reconsider(state, now)
    in_place = not healing.obstacle_to_order(state)
    if world_nodes(state) > max_nodes:
        shrink = Decision(DecisionKind.SHRINK, asked, state.generation, in_place=in_place)
        return order_stop(state, shrink, now)
    if room_to_grow(state):
        return order_stop(state, Decision(DecisionKind.GROW, asked, state.generation, in_place=in_place), now)
    return _reconsider(state, now)


def restart(state: JobState, reason: str, now: float) -> Result:
    """Restart all ranks, also those that could keep their processes: the script may have changed."""
    if not is_live(state):
        return state, ()
    plan = plan_restart(state)
    words = f"ordered by an operator: {reason}; {plan.words}"
    return order_stop(state, plan.decision(words, state.generation), now)


# --- growth: when standby nodes enlarge the world, by the policy of `--scale-up` --------------------
#
#     never          the world does not grow
#     on-restart     at the next restart, whatever its reason (see `sealing.choose`)
#     immediate      at once: wait briefly for more nodes, then stop all ranks and form the larger world
#     at-checkpoint  ask every node of the world for a checkpoint; when all have taken it, proceed as for immediate
#
# The service stores a request for a checkpoint, and sends it again to an agent that resumes its session. It does not
# store an answer: an agent that gets the request again asks its ranks again. So a lost answer costs at most one
# additional checkpoint.


def consider_growth(state: JobState, now: float) -> Result:
    """Decide whether the world grows after a node became a standby, or was admitted again."""
    if spec_of(state).scale_up is ScaleUp.AT_CHECKPOINT:
        return consider_checkpoint(state)
    more = growth(state)
    if not is_live(state) or spec_of(state).scale_up is not ScaleUp.IMMEDIATE or more <= 0:
        return state, ()
    if more >= state.max_nodes - world_nodes(state):
        return grow(state, now)
    return replace(state, timers=last_call(state.timers, spec_of(state), now)), ()


def grow(state: JobState, now: float) -> Result:
    """Order a stop to grow the world, unless all ranks of a node have finished: then the job is about to end."""
    if len(state.pending) < world_nodes(state):
        return state, ()
    in_place = not obstacle_to_order(state)
    how = "the world grows in place" if in_place else "restarting with a larger world"
    reason = f"more nodes have joined; {how}"
    return order_stop(state, Decision(DecisionKind.GROW, reason, state.generation, in_place=in_place), now)


# --- at a checkpoint -----------------------------------------------------------------------------------


def consider_checkpoint(state: JobState) -> Result:
    """Request one checkpoint, from running ranks. Nodes that join before it is complete enter the new world too."""
    if spec_of(state).scale_up is not ScaleUp.AT_CHECKPOINT or state.phase is not Phase.RUNNING:
        return state, ()
    if len(state.checkpoints_due) or growth(state) <= 0:
        return state, ()
    agents = [place.agent for place in world_of(state).placements]
    state = replace(state, checkpoints_due=FrozenMap((agent.node, True) for agent in agents))
    return state, (Persist(), *(Tell(agent, checkpoint_request(state)) for agent in agents))


def checkpoint_taken(state: JobState, node: str, now: float) -> Result:
    if state.phase is not Phase.RUNNING or node not in state.checkpoints_due:
        return state, ()
    state = replace(state, checkpoints_due=state.checkpoints_due.minus(node))
    if len(state.checkpoints_due):
        return state, ()
    state = replace(state, checkpoints_due=EMPTY)
    return grow(state, now) if growth(state) > 0 else (state, (Persist(),))


# --- what agents report about healing in place ------------------------------------------------------
#
# It may turn out only when a new rank joins the paused ones that a script cannot be healed in place: the new rank
# communicates before `State.run`, and the others do not. Then all ranks restart, which counts as a restart, and the
# job is not healed in place again.


def heal_ready(state: JobState, event: HealReady, member: Member, now: float) -> Result:
    """Note whether a node's ranks can be paused. `member` is in the current world.

    It is stored once, when all nodes are ready: then a service that takes over need not wait for them to say so again
    before it decides about a failure.
    """
    if spec_of(state).recover is Recover.RESTART:
        return state, ()
    node, before = member.agent.node, state.ready
    if event.ready != (node in before):
        state = replace(state, ready=before.plus(node, True) if event.ready else before.minus(node))
    if not event.refusal or state.refusal:
        all_are = state.ready is not before and len(state.ready) == world_nodes(state)
        return state, (Persist(),) if all_are else ()
    state = replace(state, refusal=event.refusal)
    if is_live(state) and len(state.parked):
        return _restart_without_healing(state, member, now)
    return state, (Persist(),)


def _restart_without_healing(state: JobState, member: Member, now: float) -> Result:
    """Restart all ranks of a generation that was formed in place. If a failure led to it, this counts as a restart."""
    generation, cause = state.failures[-1] if state.failures else (0, None)
    origin = cause if generation == state.generation - 1 else None
    plan = plan_restart(state)
    reason = f"{state.refusal}; all ranks restart"
    if origin is None:
        return order_stop(state, plan.decision(reason, state.generation), now)
    if spent := restarts_spent(state, now):
        state = replace(state, causes=state.causes.plus(origin.rank, origin))
        fail = Decision(
            DecisionKind.FAIL, f"not in place: {state.refusal}; {spent}", state.generation, origin
        )
        return order_stop(state, fail, now)
    return order_stop(healing.recounted(state, now), plan.decision(reason, state.generation), now)
