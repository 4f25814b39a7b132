"""From members to a world: when the service seals a round, with which nodes, and its messages to waiting nodes.

To seal a round is to fix the nodes of the next world and their ranks. Nodes that join later wait for the next round.

- Fixed size: the service seals the round as soon as the last node has joined.
- Elastic size: the service seals the round at once if the maximum number of nodes has joined. If only the minimum has
  joined, it first waits a short time for more (--last-call). Each new node starts this wait again, up to a maximum.
- After a stop, the target is the number of nodes of the previous world. If fewer are left, but at least the minimum,
  the service waits at most `shrink_after_s` for the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing import goodput, versions
from rendezvous.rounds import healing
from rendezvous.rounds.ending import end, failed
from rendezvous.rounds.policy import restarts_spent
from rendezvous.rounds.ranks import assignment, form_world, role_sizes
from rendezvous.rounds.reading import Result, by_arrival, spec_of, world_of
from rendezvous.rounds.state_recovery import (
    forgotten_size,
    next_generation,
    recovered_decision,
    same_world_again,
    with_used_restarts,
)
from rendezvous.values.events import (
    Assigned,
    CheckpointRequested,
    Ended,
    Notice,
    Persist,
    Stop,
    StoreAt,
    Tell,
    ToAgent,
    Waiting,
)
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.state import (
    DECISIONS_KEPT,
    JobState,
    Member,
    Phase,
    Timers,
    present,
    world_nodes,
)
from rendezvous.values.straggler_state import StragglerState
from rendezvous.values.types import Decision, DecisionKind, Recover, ScaleUp

if TYPE_CHECKING:
    from rendezvous.values.types import Assignment, JobSpec, Placement

PROGRESS_S = 1.0  # the shortest interval between two progress messages to waiting agents


def target_nodes(state: JobState) -> int:
    """The number of nodes with which the service seals the round at once."""
    if state.generation == 0:
        return min(state.max_nodes, forgotten_size(state) or state.max_nodes)
    return max(state.min_nodes, min(state.max_nodes, world_nodes(state)))


# --- gathering ---------------------------------------------------------------------------------------


def gather(state: JobState, now: float, newcomer: Member | None = None) -> Result:
    """Seal a forming round, or set its timers, after its members have changed."""
    here = present(state)
    if here >= target_nodes(state):
        return seal(state, now)
    timers = _settling(state, here, now, newcomer is not None)
    if timers != state.timers:  # copying a state costs more than the rest of a join
        state = replace(state, timers=timers)
    if newcomer is None:
        return state, ()
    return state, (Tell(newcomer.agent, waiting_or_running(state, newcomer)),)


def _settling(state: JobState, here: int, now: float, arrived: bool) -> Timers:
    timers, spec = state.timers, spec_of(state)
    if arrived and timers.progress_at is None:
        timers = replace(timers, progress_at=now + PROGRESS_S)
    if here < state.min_nodes:
        settling = timers.settle_at is not None or timers.settle_bound_at is not None
        return replace(timers, settle_at=None, settle_bound_at=None) if settling else timers
    if timers.settle_at is not None and (not arrived or timers.settle_bound_at == timers.settle_at):
        return timers  # no new node, or a wait for replacements, which has a fixed length
    return last_call(timers, spec, now)


def last_call(timers: Timers, spec: JobSpec, now: float) -> Timers:
    bound = timers.settle_bound_at
    if bound is None:
        bound = now + spec.last_call_bound_s
    return replace(timers, settle_at=min(now + spec.last_call_s, bound), settle_bound_at=bound)


def tell_progress(state: JobState) -> Result:
    state = replace(state, timers=replace(state.timers, progress_at=None))
    return state, tuple(Tell(m.agent, waiting_or_running(state, m)) for m in by_arrival(state))


# --- sealing -----------------------------------------------------------------------------------------


def choose(state: JobState) -> list[Member]:
    """The members of the next world: the nodes that stay, then as many standby nodes as are needed."""
    held = held_ranks(state)
    free = [m for n, m in state.members.items() if n not in state.excluded]
    stay = sorted((m for m in free if m.agent.node in held), key=lambda m: held[m.agent.node])
    stand_by = sorted((m for m in free if m.agent.node not in held), key=lambda m: m.arrival)
    stay = stay[: state.max_nodes]
    fill = max(0, target_nodes(state) - len(stay))
    grow = _growing(state, len(stay) + fill, len(stand_by) - fill) if state.generation else 0
    return stay + stand_by[: fill + grow]


def _growing(state: JobState, size: int, spare: int) -> int:
    spec = spec_of(state)
    ordered = state.decision is not None and state.decision.kind is DecisionKind.GROW
    if spec.scale_up is ScaleUp.NEVER and not ordered:
        return 0
    return max(0, min(state.max_nodes - size, spare - spec.spares))


def held_ranks(state: JobState) -> dict[str, int]:
    if state.world is None:
        return {}
    return {p.agent.node: p.node_rank for p in state.world.placements}


def seal(state: JobState, now: float) -> Result:
    """Seal a world of the next generation. The caller has checked that enough members are present."""
    chosen = choose(state)
    if (over := _without_heal_or_restart(state, chosen, now)) is not None:
        return over
    state, again = with_used_restarts(state, chosen), same_world_again(state, chosen)
    generation = next_generation(state) if again is None else again.generation
    world = again or form_world(generation, [(m.agent, m.facts) for m in chosen], held_ranks(state))
    ranks = {p.agent.node: p.node_rank for p in world.placements}
    state = healing.sealed(state, ranks, now)
    state = replace(
        state,
        phase=Phase.SEALED,
        generation=generation,
        world=world,
        role_sizes=role_sizes(world),
        store=None,
        members=FrozenMap(
            (n, replace(m, node_rank=ranks.get(n), ran=None)) for n, m in state.members.items()
        ),
        decisions=(*state.decisions, *recovered_decision(state, again=again is not None))[-DECISIONS_KEPT:],
        pending=FrozenMap((n, True) for n in ranks),
        causes=EMPTY,
        straggler_state=StragglerState(),
        time=goodput.next_generation(state.time, held_ranks(state)),
        decision=None,
        timers=Timers(
            give_up_at=now + spec_of(state).join_timeout_s,
            lease_check_at=state.timers.lease_check_at,
            readmit_at=state.timers.readmit_at,
        ),
    )
    messages = [Tell(p.agent, Assigned(_slice(state, p))) for p in world.placements]
    for differ in filter(None, (versions.warning(world), versions.arguments_warning(world))):
        messages += [Tell(p.agent, Notice(generation, differ)) for p in world.placements]
    left_out = [Tell(m.agent, waiting(state, m)) for m in by_arrival(state) if m.node_rank is None]
    return state, (Persist(), *messages, *left_out)


def _without_heal_or_restart(state: JobState, chosen: list[Member], now: float) -> Result | None:
    """The end of the job, if the paused ranks were lost while it waited for nodes, and no restart is allowed."""
    decision = healing.lost_heal(state, [m.agent.node for m in chosen])
    if decision is None or decision.cause is None or not (spent := restarts_spent(state, now)):
        return None
    reason = f"not in place: {healing.NOBODY_IS_LEFT}; {spent}"
    fail = Decision(DecisionKind.FAIL, reason, state.generation, decision.cause)
    state = healing.uncounted(state, decision)
    return end(state, failed(state, reason, decision.cause), fail)


def _slice(state: JobState, place: Placement) -> Assignment:
    limit = spec_of(state).budget.limit
    failures = state.restarts_used + state.heals_used  # growth and orders are not restarts, as under torchrun
    mine = assignment(world_of(state), place, state.role_sizes, failures, limit)
    repeat = state.time.repeat
    return replace(
        mine,
        reason=_why(state),
        in_place=len(state.parked) > 0,
        can_heal=spec_of(state).recover is not Recover.RESTART,
        heals=state.heals_used,
        parked=state.parked.get(place.agent.node, ()),
        repeat_steps=repeat.steps,
        repeat_up_to=repeat.up_to,
        wants_times=True,
        edition=state.reload.edition,
        kept_from=state.reload.kept_from,
    )


def _why(state: JobState) -> str:
    """The reason of the last decision about the previous generation. The stop order contained the first decision."""
    before = (d.reason for d in reversed(state.decisions) if d.generation == state.generation - 1)
    return next(before, "") if state.generation > 1 else ""


# --- messages to a member ----------------------------------------------------------------------------


def missed_messages(state: JobState, member: Member) -> tuple[ToAgent, ...]:
    """All messages that a member may have missed before its session resumed. A duplicate has no effect."""
    if state.outcome is not None:
        return (Ended(state.outcome),)
    if member.node_rank is None:
        return (waiting_or_running(state, member),)
    if state.phase is Phase.STOPPING:
        assert state.decision is not None
        return (Stop(state.generation, state.decision),)
    mine = Assigned(_slice(state, world_of(state).placements[member.node_rank]))
    if state.store is None:
        return (mine,)
    due = (checkpoint_request(state),) if member.agent.node in state.checkpoints_due else ()
    return (mine, StoreAt(state.generation, state.store), *due)


def checkpoint_request(state: JobState) -> CheckpointRequested:
    return CheckpointRequested(
        state.generation, "more nodes have joined; the job restarts with them after this checkpoint"
    )


def waiting_or_running(state: JobState, member: Member) -> ToAgent:
    """The message to a member of a forming round.

    An agent whose ranks run in a world that the service has lost gets its assignment again: `Waiting` would make the
    agent stop its ranks.
    """
    if state.phase is Phase.FORMING and member.ran is not None:
        return Assigned(member.ran)
    return waiting(state, member)


def waiting(state: JobState, member: Member) -> Waiting:
    here, node = present(state), member.agent.node
    target = target_nodes(state) if here >= state.min_nodes else state.min_nodes
    exclusion = state.excluded.get(node)
    if exclusion is not None:
        return Waiting(f"{node} is excluded: {exclusion.reason}", here, target, stands_by=True)
    if state.phase is not Phase.FORMING:
        reason = f"the job runs without this node; the node {_role_of_standby(state)}"
        return Waiting(reason, here, target, stands_by=True)
    if here >= state.min_nodes and state.generation:
        wait_s = spec_of(state).shrink_after_s
        shrinks = f"if none joins within {wait_s:g} s, the job continues with fewer nodes"
        return Waiting(f"waiting for a replacement; {shrinks}", here, target)
    if here >= state.min_nodes:
        wait_s = spec_of(state).last_call_s
        return Waiting(f"enough nodes have joined; waiting {wait_s:g} s for more (--last-call)", here, target)
    missing = state.min_nodes - here
    reason = f"waiting for {missing} more node{'s' if missing > 1 else ''}{_left_out(state)}"
    return Waiting(reason, here, target)


def _role_of_standby(state: JobState) -> str:
    """Say why the node waits, and how it can get in."""
    spec = spec_of(state)
    if spec.spares:
        return "waits as a spare, to replace one that is lost (--spares)"
    if world_nodes(state) >= state.max_nodes:
        return "is on standby: the job has all its nodes (--nnodes)"
    when = {
        ScaleUp.NEVER: "it gets in when a node is missing",
        ScaleUp.ON_RESTART: "it gets in at the next restart; to restart now: ddpctl restart",
        ScaleUp.IMMEDIATE: "it gets in within --last-call",
        ScaleUp.AT_CHECKPOINT: "it gets in when the ranks have taken a checkpoint",
    }
    return f"is on standby: {when[spec.scale_up]} (--scale-up {spec.scale_up})"


def _left_out(state: JobState) -> str:
    """For agents that wait for more nodes: why some of the nodes are excluded."""
    reasons = [
        f"{node} is excluded: {x.reason}" for node, x in state.excluded.items() if node in state.members
    ]
    return f" ({'; '.join(reasons[:3])})" if reasons else ""
