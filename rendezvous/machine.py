"""The round machine: `step(state, event, now) -> (state', effects)` makes every decision of the rendezvous.

It has no I/O, no clock and no randomness. The rules are in `rounds/`: admission (which agents may join), sealing (fix
the nodes of a world), stopping, and orders of operators. This module dispatches events to their rules, rejects stale
events, and handles deadlines.

- For an event that changes nothing, `step` returns the same state object. It may still return answers.
- If there is a Persist, it is the first effect: a message is only sent after the state is stored.
- A report counts only if it comes from the current agent of its node and belongs to the current generation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from rendezvous.diagnosing import goodput, stragglers
from rendezvous.rounds import hang_examination, healing, orders
from rendezvous.rounds.admission import check_leases, join, leave, lose, renew_lease
from rendezvous.rounds.orders import checkpoint_taken, consider_checkpoint, grow
from rendezvous.rounds.policy import growth
from rendezvous.rounds.sealing import end_incomplete_round, seal, store_timeout_s, tell_progress, waiting
from rendezvous.rounds.stopping import (
    abort,
    finish_if_all_did,
    node_stopped,
    rank_failed,
    stopped_unasked,
)
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentLost,
    AgentStopped,
    CheckpointTaken,
    DeadlineReached,
    Effect,
    Event,
    Examined,
    HealReady,
    JobAborted,
    JobResized,
    NodeDrained,
    NodeHealth,
    NodeResumed,
    Notice,
    Persist,
    PhaseTimesReported,
    RankFailed,
    RanksFinished,
    RanksStalled,
    RankTimesReported,
    RestartOrdered,
    SetDeadline,
    StoreAt,
    StoreOpened,
    Tell,
)
from rendezvous.values.job_state import (
    JobState,
    Member,
    Phase,
    Result,
    is_live,
    member_of,
    present,
    spec_of,
    standing_by,
    world_nodes,
    world_of,
)
from rendezvous.values.types import AgentId, StragglerPolicy

_MOST_IMPORTS = 8  # agents report three modules


def step(state: JobState, event: Event, now: float) -> Result:
    after, effects = _react(state, event, now)
    if after is state and not isinstance(event, DeadlineReached):
        return state, effects
    return _completed(after, effects, now, rearm=isinstance(event, DeadlineReached))


def _completed(state: JobState, effects: tuple[Effect, ...], now: float, *, rearm: bool) -> Result:
    """Put one Persist first, and add a SetDeadline if the next deadline has changed."""
    if any(isinstance(e, Persist) for e in effects):
        effects = (Persist(), *(e for e in effects if not isinstance(e, Persist)))
        state = replace(state, as_of=now)
    at = state.timers.earliest()
    if at != state.deadline_at:
        state = replace(state, deadline_at=at)
    elif not rearm:
        return state, effects
    return state, (*effects, SetDeadline(at))


def _react(state: JobState, event: Event, now: float) -> Result:
    match event:
        case AgentHeard(agent, progress):
            return renew_lease(state, agent, now, progress=progress)
        case AgentJoined():
            return join(state, event, now)
        case AgentLeft(agent, reason, ends_job):
            member = _live_member(state, agent)
            return leave(state, member, reason, now, ends_job=ends_job) if member else (state, ())
        case AgentLost(agent, reason):
            member = _live_member(state, agent)
            return lose(state, [member], f"was lost: {reason}", now) if member else (state, ())
        case StoreOpened() | RankFailed() | RanksFinished() | AgentStopped() | CheckpointTaken():
            return _report(state, event, now)
        case RanksStalled() | Examined() | PhaseTimesReported() | HealReady():
            return _report(state, event, now)
        case NodeHealth():
            return _node_health(state, event, now)
        case RankTimesReported():
            return _rank_times_reported(state, event)
        case DeadlineReached():
            return _handle_deadlines(state, now)
        case _:
            return _order(state, event, now)


def _live_member(state: JobState, agent: AgentId) -> Member | None:
    return None if state.phase is Phase.ENDED else member_of(state, agent)


# --- reports: each is checked for agent and generation first -------------------------------------------


def _report(
    state: JobState,
    event: StoreOpened
    | RankFailed
    | RanksFinished
    | AgentStopped
    | CheckpointTaken
    | RanksStalled
    | Examined
    | HealReady
    | PhaseTimesReported,
    now: float,
) -> Result:
    member = _live_member(state, event.agent)
    if member is None and isinstance(event, StoreOpened | AgentStopped) and not member_of(state, event.agent):
        return renew_lease(state, event.agent, now)  # tells it: on one machine no heartbeat would
    if member is None or event.generation != state.generation:
        return state, ()
    if member.node_rank is None:
        return (_waits_with_fewer(state, event) if isinstance(event, AgentStopped) else state), ()
    node = event.agent.node
    match event:
        case StoreOpened():
            return _store_opened(state, event, member)
        case RankFailed():
            return _rank_failed(state, event, member, now)
        case RanksFinished():
            if state.phase is not Phase.RUNNING or node not in state.pending:
                return state, ()
            return _finish_if_none_pending(replace(state, pending=state.pending.minus(node)))
        case AgentStopped():
            if state.phase is Phase.STOPPING:
                return node_stopped(state, event, now)
            is_pending = state.phase is Phase.RUNNING and node in state.pending
            return stopped_unasked(state, member, now) if is_pending else (state, ())
        case CheckpointTaken():
            return checkpoint_taken(state, node, now)
        case RanksStalled():
            return hang_examination.ranks_stalled(state, member, now)
        case Examined():
            return hang_examination.examined(state, member, event.reports, now)
        case HealReady():
            return orders.heal_ready(state, event, member, now)
        case PhaseTimesReported():
            return _phase_times_reported(state, event, member)
        case _:
            assert_never(event)


def _waits_with_fewer(state: JobState, event: AgentStopped) -> JobState:
    """A node that waits for the next world reports again because a paused rank has ended."""
    if state.phase is not Phase.FORMING:
        return state
    return healing.fewer_parked(state, event.agent.node, event.parked)


def _store_opened(state: JobState, event: StoreOpened, member: Member) -> Result:
    if state.phase is not Phase.SEALED or member.node_rank != 0:
        return state, ()
    timers = replace(state.timers, give_up_at=None)
    state = replace(state, phase=Phase.RUNNING, store=event.store, timers=timers)
    store_at = StoreAt(event.generation, event.store)
    state, more = consider_checkpoint(state)
    return state, (Persist(), *(Tell(p.agent, store_at) for p in world_of(state).placements), *more)


def _rank_failed(state: JobState, event: RankFailed, member: Member, now: float) -> Result:
    assert member.node_rank is not None
    first = world_of(state).placements[member.node_rank].rank_offset
    if state.phase is Phase.FORMING or not first <= event.cause.rank < first + member.facts.nproc:
        return state, ()
    cause = (
        event.cause if event.cause.node == event.agent.node else replace(event.cause, node=event.agent.node)
    )
    state, effects = rank_failed(state, cause, now)
    return hang_examination.answered(state, cause.rank, now), effects


def _phase_times_reported(state: JobState, event: PhaseTimesReported, member: Member) -> Result:
    rule, place = spec_of(state).stragglers, world_of(state).placements[member.node_rank or 0]
    ranks = range(place.rank_offset, place.rank_offset + member.facts.nproc)
    phase_times = tuple(times for times in event.ranks if times.rank in ranks)
    if state.phase is not Phase.RUNNING or rule.policy is StragglerPolicy.OFF:
        return state, ()
    node, nodes = event.agent.node, world_nodes(state)
    straggler_state, news = stragglers.add_report(state.straggler_state, node, phase_times, nodes, rule)
    homes = {p.agent.node: p.agent for p in world_of(state).placements}
    keeper = world_of(state).placements[0].agent  # the node whose log users read first
    notices = [
        Tell(agent, Notice(state.generation, text))
        for node, text in news
        for agent in dict.fromkeys((keeper, homes[node]))
    ]
    return replace(state, straggler_state=straggler_state), tuple(notices)


def _rank_times_reported(state: JobState, event: RankTimesReported) -> Result:
    """The time is the agent's since its start, so a report of an earlier generation counts too."""
    member = _live_member(state, event.agent)
    if member is None or len(event.ranks) > member.facts.nproc:
        return state, ()
    time = goodput.reported(state.time, event.agent.node, event.agent.incarnation, event.ranks)
    state = replace(state, time=time)
    imports = tuple(dict.fromkeys((*state.imports, *event.imports)))[:_MOST_IMPORTS]
    if imports == state.imports or state.phase is not Phase.RUNNING:
        return state, ()
    state = replace(state, imports=imports)
    return state, tuple(Tell(each.agent, waiting(state, each)) for each in standing_by(state))


def _node_health(state: JobState, event: NodeHealth, now: float) -> Result:
    """A node that was left out because it was unfit returns when it is fit again."""
    node, was = event.agent.node, state.unfit.get(event.agent.node, "")
    known = (state.health.get(node, ()), was)
    if _live_member(state, event.agent) is None or known == (event.complaints, event.unfit):
        return state, ()
    health = state.health.plus(node, event.complaints) if event.complaints else state.health.minus(node)
    unfit = state.unfit.plus(node, event.unfit) if event.unfit else state.unfit.minus(node)
    state = replace(state, health=health, unfit=unfit)
    exclusion = state.excluded.get(node)
    if was and not event.unfit and exclusion is not None and exclusion.for_health:
        return orders.readmit(state, [node], now)
    return orders.leave_out(state, event.agent, event.unfit, now) if event.is_asked else (state, ())


def _finish_if_none_pending(state: JobState) -> Result:
    return (state, ()) if len(state.pending) else finish_if_all_did(state)


# --- orders and deadlines ------------------------------------------------------------------------------


def _order(
    state: JobState,
    event: NodeDrained | JobResized | JobAborted | RestartOrdered | NodeResumed,
    now: float,
) -> Result:
    match event:
        case NodeDrained(node, reason):
            return orders.drain(state, node, reason, now)
        case JobResized(min_nodes, max_nodes):
            return orders.resize(state, min_nodes, max_nodes, now)
        case JobAborted(reason):
            return abort(state, reason, now)
        case RestartOrdered(reason):
            return orders.restart(state, reason, now)
        case NodeResumed(node):
            return orders.resume_node(state, node, now)
        case _:
            assert_never(event)


def _handle_deadlines(state: JobState, now: float) -> Result:
    """Handle the timers that have expired by `now`, in order. Each uses the state after the previous timer."""
    effects: tuple[Effect, ...] = ()
    for timer, act in _TIMERS:
        at = getattr(state.timers, timer)
        if at is not None and at <= now:
            state, more = act(state, now)
            effects = (*effects, *more)
    return state, effects


def _readmit(state: JobState, now: float) -> Result:
    due = {n: x for n, x in state.excluded.items() if x.until is not None and x.until <= now}
    over = [node for node in due if node not in state.unfit]
    for node in due.keys() - over:  # a node that is still unfit would be left out again at the next restart
        renewed = replace(due[node], until=now + spec_of(state).node_cooldown_s)
        state = replace(state, excluded=state.excluded.plus(node, renewed))
    later = min(
        (x.until for x in state.excluded.values() if x.until is not None and x.until > now), default=None
    )
    state = replace(state, timers=replace(state.timers, readmit_at=later))
    return orders.readmit(state, over, now) if over else (state, ())


def _settle(state: JobState, now: float) -> Result:
    timers = replace(state.timers, settle_at=None, settle_bound_at=None)
    state = replace(state, timers=timers)
    if is_live(state):
        return grow(state, now) if growth(state) else (state, ())
    return seal(state, now) if present(state) >= state.min_nodes else (state, ())


def _give_up(state: JobState, now: float) -> Result:
    if state.phase is Phase.SEALED:
        keeper = [m for m in state.members.values() if m.node_rank == 0]
        limit_s = store_timeout_s(spec_of(state))
        reason = f"did not open its TCPStore within {limit_s:g} s (see the log of its agent)"
        return lose(state, keeper, reason, now)
    return seal(state, now) if present(state) >= state.min_nodes else end_incomplete_round(state)


def _stop_budget_spent(state: JobState, now: float) -> Result:
    late = [state.members[node] for node in state.pending]
    state = replace(state, timers=replace(state.timers, stop_by=None))
    return lose(state, late, f"did not stop its ranks within {spec_of(state).stop_budget_s:g} s", now)


def _progress(state: JobState, now: float) -> Result:
    return tell_progress(state)


# Leases first: the following timers must not count members that are lost.
_TIMERS = (
    ("lease_check_at", check_leases),
    ("stop_by", _stop_budget_spent),
    ("readmit_at", _readmit),
    ("settle_at", _settle),
    ("give_up_at", _give_up),
    ("progress_at", _progress),
    ("examine_at", hang_examination.due),
)
