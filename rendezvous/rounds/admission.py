"""Admission: which agents may join, which are refused and why, and which are lost.

A node has one agent at a time. If a new agent process joins for the node, it replaces the old agent, which is
then retired: a late message from it changes nothing. If the lease of an agent has expired, the answer to its next
heartbeat says so, and the agent may join again.

The lease is long, because an agent that is stopped, starved or cut off may have ranks that are in the middle of a long
step. A node counts as lost earlier only with evidence that its ranks have stopped too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rendezvous.rounds import healing
from rendezvous.rounds.orders import consider_growth
from rendezvous.rounds.policy import outcome_text
from rendezvous.rounds.sealing import gather, is_forgotten, missed_messages, remember_generation, waiting
from rendezvous.rounds.stopping import after_loss, exclude, interrupt
from rendezvous.values.contracts import NOT_ALLOWED, TRY_AGAIN, UNUSABLE
from rendezvous.values.events import (
    AgentJoined,
    Disagreement,
    Effect,
    Ended,
    Notice,
    RefusalKind,
    Refused,
    SetDeadline,
    Tell,
)
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import (
    INCARNATIONS_KEPT,
    JobState,
    Member,
    Phase,
    Result,
    Timers,
    by_arrival,
    member_of,
    spec_of,
)
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.text_limits import NAME
from rendezvous.values.types import AgentId, Assignment, FailureClass, JobSpec, NodeFacts, RestartBudget

# The name of each field of the spec in messages: the option that sets it, if there is one.
KNOWN_AS = {
    "job_id": "--rdzv-id",
    "min_nodes": "--nnodes (minimum)",
    "max_nodes": "--nnodes (maximum)",
    "entry_point": "the entry point",
    "nproc": "--nproc-per-node",
    "version": "the version of ddp-launch",
    "budget": "--max-restarts",
    "crash_loop": "--crash-loop",
    "join_timeout_s": "--join-timeout",
    "last_call_s": "--last-call",
    "last_call_bound_s": "the maximum of --last-call",
    "replacement_timeout_s": "--replacement-timeout",
    "lease_s": "the lease of a node (keep_alive_interval x keep_alive_max_attempt of --rdzv-conf)",
    "stop_budget_s": "--shutdown-timeout (plus the time to reap the ranks)",
    "spares": "--spares",
    "scale_up": "--scale-up",
    "node_failure_limit": "the number of failures that exclude a node",
    "node_cooldown_s": "the time for which a node is excluded",
    "rules": "--failure-policy",
    "shrink_after_s": "--shrink-after (default: the value of --replacement-timeout, if it is set)",
    "stragglers": "--stragglers",
    "recover": "--recover",
    "heal_budget": "--max-heals",
}
_NODES_NOTIFIED = 8  # a person reads the output of the first nodes; thousands of equal lines are of no use
_SAME_VALUE = "Start all nodes with the same value"
_SAME_RELEASE = "Install the same release on all nodes"
_SHOWN_CHARS = 256  # of a value of a setting
_KEPT_WITHOUT_WORLD = (
    "spec min_nodes max_nodes generation retired excluded node_failures refusal arrivals restarts_used restart_times "
    "heals_used heal_times decisions failures forgotten"
).split()
_USUAL_GAPS = 2.0  # ranks that progressed regularly have stopped after this many of their longest gaps
_FIRST_ASKED = ("version", "entry_point", "nproc", "min_nodes", "max_nodes")


# --- joining -----------------------------------------------------------------------------------------


def join(state: JobState, event: AgentJoined, now: float) -> Result:
    agent, facts = event.agent, event.facts
    known = member_of(state, agent)
    if known is not None and _is_older_than(state, known, event):
        state, known = _without_its_world(state, now), None
    if known is not None:
        renewed = replace(state, leases=state.leases.plus(agent.node, now))
        return renewed, tuple(Tell(agent, m) for m in missed_messages(state, known))
    refusal = _refusal(state, event)
    if refusal is not None:
        return state, (Tell(agent, refusal), *_reported_to_waiting_nodes(state, agent, refusal))
    if state.spec is None:
        spec = event.spec
        timers = replace(state.timers, give_up_at=now + spec.join_timeout_s)
        state = replace(state, spec=spec, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes, timers=timers)
    state = remember_generation(state, event)
    before = state.members.get(agent.node)
    if before is not None:
        state = retire(forget(state, [before]), before.agent)
    newcomer = Member(agent, facts, state.arrivals, ran=event.running if is_forgotten(state) else None)
    state = _health_considered(_admitted(state, newcomer, now), newcomer, now)
    if before is not None and before.node_rank is not None:
        # The ranks of the old agent are lost, so this generation ends. The node needs a place in the next one.
        welcome = Tell(agent, waiting(state, newcomer))
        state, effects = after_loss(state, [before], "started a new agent", now)
        return state, (welcome, *effects)
    return _arrived(state, newcomer, now)


def _is_older_than(state: JobState, known: Member, event: AgentJoined) -> bool:
    """Whether this agent has run in a generation of which the state knows nothing: the store comes from a backup."""
    if state.outcome is not None or event.generation <= state.generation:
        return False
    return state.phase is not Phase.FORMING or (known.ran is None and event.running is not None)


def _without_its_world(state: JobState, now: float) -> JobState:
    """The agents recover the later world by what they report, as after the loss of the whole state."""
    return JobState(
        **{name: getattr(state, name) for name in _KEPT_WITHOUT_WORLD},
        timers=Timers(give_up_at=now + spec_of(state).join_timeout_s),
    )


def _admitted(state: JobState, newcomer: Member, now: float) -> JobState:
    node, rank, timers = newcomer.agent.node, newcomer.facts.node_rank, state.timers
    if timers.lease_check_at is None:
        timers = replace(timers, lease_check_at=now + spec_of(state).lease_s)
    return replace(
        state,
        members=state.members.plus(node, newcomer),
        leases=state.leases.plus(node, now),
        claims=state.claims if rank is None else state.claims.plus(rank, node),
        arrivals=state.arrivals + 1,
        timers=timers,
    )


def _health_considered(state: JobState, newcomer: Member, now: float) -> JobState:
    node, facts = newcomer.agent.node, newcomer.facts
    exclusion = state.excluded.get(node)
    if not facts.healthy and exclusion is None:
        note = facts.health_note or "no details; see the log of its agent"
        return exclude(state, node, f"it failed its health check: {note}", now, for_health=True)
    if facts.healthy and exclusion is not None and exclusion.for_health:
        return replace(state, excluded=state.excluded.minus(node))
    return state


def _arrived(state: JobState, newcomer: Member, now: float) -> Result:
    if state.phase is Phase.FORMING:
        return gather(state, now, newcomer)
    welcome = Tell(newcomer.agent, waiting(state, newcomer))
    state, effects = consider_growth(state, now)
    return state, (welcome, *effects)


# --- refusing ----------------------------------------------------------------------------------------


def _refusal(state: JobState, event: AgentJoined) -> Refused | None:
    agent, facts = event.agent, event.facts
    if state.outcome is not None:
        return _too_late(state)
    if agent.incarnation in state.retired.get(agent.node, ()):
        return Refused(_retired(agent), NOT_ALLOWED)
    if state.spec is not None and event.spec != state.spec:
        return _disagreement(state.spec, event.spec)
    if facts.nproc < 1:
        return Refused(
            f"{agent.node} has no ranks to run: --nproc-per-node is {facts.nproc}; use 1 or more",
            UNUSABLE,
        )
    return _claim_refusal(state, event.spec, agent.node, facts)


def _reported_to_waiting_nodes(state: JobState, agent: AgentId, refusal: Refused) -> Iterator[Tell]:
    """Nodes that wait for one more would otherwise not learn that it came, and why it cannot join."""
    if state.phase is not Phase.FORMING or refusal.exit_code != UNUSABLE:
        return
    notice = Notice(state.generation, f"node {agent.node} tried to join and was rejected: {refusal.reason}")
    for member in itertools.islice(by_arrival(state), _NODES_NOTIFIED):
        if member.agent.node != agent.node:
            yield Tell(member.agent, notice)


def _claim_refusal(state: JobState, spec: JobSpec, node: str, facts: NodeFacts) -> Refused | None:
    rank = facts.node_rank
    if rank is None:
        return None
    limit = spec.max_nodes if state.spec is None else state.max_nodes
    if not 0 <= rank < limit:
        return Refused(f"--node-rank {rank} of {node}: use 0 to {limit - 1}", UNUSABLE)
    owner = state.claims.get(rank)
    if owner is None or owner == node:
        return None
    return Refused(
        f"--node-rank {rank} is set on {owner} and on {node}; give each node its own number", UNUSABLE
    )


def _disagreement(ours: JobSpec, theirs: JobSpec) -> Refused:
    fields = [*_FIRST_ASKED, *(f for f in ours.__slots__ if f not in _FIRST_ASKED)]
    name = next(f for f in fields if getattr(ours, f) != getattr(theirs, f))
    found = Disagreement(name, _option_text(getattr(ours, name)), _option_text(getattr(theirs, name)))
    reason = (
        f"the nodes of the job have different values of {KNOWN_AS[name]}: the job has {found.of_job}, "
        f"this node has {found.of_node}. {_SAME_RELEASE if name == 'version' else _SAME_VALUE}"
    )
    kind = RefusalKind.DISAGREEMENT
    return Refused(reason, UNUSABLE, kind=kind, disagreement=found)


def _option_text(value: object) -> str:
    text = repr(value) if isinstance(value, str) and not value else str(value)
    return text[:_SHOWN_CHARS]


def _too_late(state: JobState) -> Refused:
    assert state.outcome is not None
    code = NOT_ALLOWED if state.outcome.succeeded else state.outcome.exit_code
    return Refused(f"the job has ended: {outcome_text(state.outcome)}", code, kind=RefusalKind.JOB_OVER)


# --- heartbeats and leases -----------------------------------------------------------------------------


def is_in_world(state: JobState, agent: AgentId) -> bool:
    member = member_of(state, agent)
    return member is not None and member.node_rank is not None


def trains(state: JobState, agent: AgentId) -> bool:
    """Whether ranks of this agent run in the current generation."""
    return state.phase is Phase.RUNNING and is_in_world(state, agent)


def alive_by_progress(state: JobState, agent: AgentId) -> tuple[AgentId, ...]:
    """Return the agents whose ranks are alive if the ranks of `agent` finish collectives with ranks of other nodes.

    These are all agents of the world: such a collective needs the ranks of the other nodes too, or soon waits for one
    that does. An agent may be silent (stopped, out of memory, behind a broken link) while its ranks train.
    """
    if state.world is None or not trains(state, agent):
        return ()
    return tuple(placement.agent for placement in state.world.placements)


@dataclass(frozen=True, slots=True)
class Cadence:
    """How regularly the ranks of a generation have reported progress."""

    generation: int
    first_at: float
    last_at: float
    longest_gap_s: float = 0.0

    def limit_s(self, least_s: float, lease_s: float) -> float:
        """After this time without progress the ranks have stopped. Infinite: they may be busy with a long step."""
        limit_s = max(least_s, _USUAL_GAPS * self.longest_gap_s)
        is_known = self.last_at - self.first_at >= lease_s and limit_s < lease_s
        return limit_s if is_known else math.inf


def after_progress(before: Cadence | None, generation: int, now: float) -> Cadence:
    if before is None or before.generation != generation:
        return Cadence(generation, now, now)
    gap_s = max(before.longest_gap_s, now - before.last_at)
    return replace(before, last_at=now, longest_gap_s=gap_s)


def is_lost_early(
    state: JobState,
    agent: AgentId,
    cadence: Cadence | None,
    silent_since: float,
    heard_at: float,
    least_s: float,
) -> bool:
    """Whether an agent counts as lost before its lease expires, because its ranks have stopped too.

    Either ranks of other nodes report lost connections and no other failure, and wait for this agent to stop. Or the
    ranks had progressed regularly, and stopped when it fell silent. `heard_at` is the time of the latest heartbeat of
    an agent of the world. Of later times nothing is known.
    """
    if heard_at - silent_since < least_s:
        return False
    if state.phase is Phase.STOPPING:
        failed = {cause.failure for cause in state.causes.values()}
        return failed == {FailureClass.CONSEQUENCE} and agent.node in state.pending
    if not trains(state, agent) or cadence is None or cadence.generation != state.generation:
        return False
    limit_s = cadence.limit_s(least_s, spec_of(state).lease_s)
    is_together = abs(silent_since - cadence.last_at) <= limit_s
    return is_together and heard_at - max(silent_since, cadence.last_at) >= limit_s


def renew_lease(state: JobState, agent: AgentId, now: float, *, progress: bool = False) -> Result:
    """Renew a lease. Each heartbeat calls this, so it changes only one bucket of the leases."""
    if member_of(state, agent) is not None:
        if state.outcome is not None:
            return state, (Tell(agent, Ended(state.outcome)),)
        if progress:
            alive = dict.fromkeys(alive_by_progress(state, agent), now)
            return renew_leases(state, alive | {agent: now}), ()
        return replace(state, leases=state.leases.plus(agent.node, now)), ()
    return state, (Tell(agent, _not_a_member(state, agent)),)


def renew_leases(state: JobState, heartbeats: Mapping[AgentId, float]) -> JobState:
    """Renew many leases at once, each from the time of its heartbeat.

    The result is the same as that of `renew_lease` for each member in turn.
    """
    fresh = {agent.node: at for agent, at in heartbeats.items() if member_of(state, agent) is not None}
    if not fresh or state.outcome is not None:
        return state
    leases = FrozenMap((node, max(at, fresh.get(node, at))) for node, at in state.leases.items())
    return replace(state, leases=leases)


def _not_a_member(state: JobState, agent: AgentId) -> Refused:
    if state.outcome is not None:
        return _too_late(state)
    if agent.incarnation in state.retired.get(agent.node, ()):
        return Refused(_retired(agent), NOT_ALLOWED)
    return Refused(
        "the job continues without this agent; the agent now joins again", TRY_AGAIN, retryable=True
    )


def _retired(agent: AgentId) -> str:
    return (
        f"this agent of {agent.node} was replaced by a newer agent, or has left the job. "
        f"Start ddp-launch again only if no other agent runs on {agent.node}"
    )


def forget(state: JobState, gone: Sequence[Member]) -> JobState:
    members, leases, claims = state.members, state.leases, state.claims
    health, unfit = state.health, state.unfit
    for member in gone:
        node, rank = member.agent.node, member.facts.node_rank
        members, leases = members.minus(node), leases.minus(node)
        health, unfit = health.minus(node), unfit.minus(node)
        if rank is not None and claims.get(rank) == node:
            claims = claims.minus(rank)
        state = healing.forgotten(state, node)
    return replace(state, members=members, leases=leases, claims=claims, health=health, unfit=unfit)


def retire(state: JobState, agent: AgentId) -> JobState:
    old = state.retired.get(agent.node, ())
    return replace(
        state, retired=state.retired.plus(agent.node, (*old, agent.incarnation)[-INCARNATIONS_KEPT:])
    )


def lose(state: JobState, gone: Sequence[Member], reason: str, now: float) -> Result:
    return after_loss(forget(state, gone), gone, reason, now)


def leave(state: JobState, member: Member, reason: str, now: float, *, ends_job: bool) -> Result:
    """A node leaves. `ends_job` has an effect if it is in the world: a spare, or a node that waits, only leaves."""
    in_world = member.node_rank is not None and state.phase is not Phase.FORMING
    state = retire(forget(state, [member]), member.agent)
    if ends_job and in_world:
        return interrupt(state, member, reason, now)
    return after_loss(state, [member], f"left: {reason}", now, left=True)


def check_leases(state: JobState, now: float) -> Result:
    lease_s = spec_of(state).lease_s
    late = [state.members[n] for n, at in state.leases.items() if at + lease_s <= now]
    state = replace(state, timers=replace(state.timers, lease_check_at=None))
    state, effects = (
        lose(state, late, f"was lost: no heartbeat for {lease_s:g} s", now) if late else (state, ())
    )
    if state.spec is None or state.outcome is not None:
        return state, effects
    due = min((at + lease_s for at in state.leases.values()), default=None)
    return replace(state, timers=replace(state.timers, lease_check_at=due)), effects


# --- resume: take over a job from its snapshot, after the service has crashed or given it up --------
#
# The times in a snapshot use the clock of the process that wrote it. After a resume, each timeout keeps the remaining
# time that it had in the snapshot. The service sends every member the current state, since the member may have missed
# it. Every member gets a new lease, since its heartbeats could not arrive in the meantime. This first lease is at
# least 15 s long, because a disconnected agent tries to reconnect only every few seconds while its ranks run. In a
# large job it is longer: the service accepts thousands of agents one after the other, and those that wait for it are
# not lost.

_FIRST_LEASE_S = 15.0  # at least
_CROWD = 400  # members: more of them have a longer first lease ...
_MAX_TIME_FACTOR = 4.0  # ... in proportion, up to this factor, as the patience of agents (session_rules.py)


def resume(state: JobState, now: float) -> Result:
    state = _with_own_clock(state, now)
    messages: list[Effect] = [
        Tell(m.agent, message) for m in by_arrival(state) for message in missed_messages(state, m)
    ]
    return state, (*messages, SetDeadline(state.deadline_at))


def _with_own_clock(state: JobState, now: float) -> JobState:
    by_s = now - state.as_of
    timers, renewed_at = replace(state.timers.shifted(by_s), examine_at=None), now
    if state.spec is not None and len(state.members) and state.outcome is None:
        timers = replace(timers, lease_check_at=now + state.spec.lease_s)
        factor = min(max(1.0, len(state.members) / _CROWD), _MAX_TIME_FACTOR)
        renewed_at = now + max(0.0, factor * _FIRST_LEASE_S - state.spec.lease_s)
    excluded = (
        (n, x if x.until is None else replace(x, until=x.until + by_s)) for n, x in state.excluded.items()
    )
    return replace(
        state,
        as_of=now,
        timers=timers,
        deadline_at=timers.earliest(),
        leases=FrozenMap((node, renewed_at) for node in state.members),
        excluded=FrozenMap(excluded),
        restart_times=tuple(at + by_s for at in state.restart_times),
        heal_times=tuple(at + by_s for at in state.heal_times),
        examination=None,
    )


# --- limits of a join: a job spec outside of these could overload the service -----------------------

JOB_ID_CHARS = 128
_NODES = 100_000
_RANKS_PER_NODE = 4096
_YEAR_S = 366 * 86_400.0
_COUNT = 1_000_000
_GENERATIONS = 1_000_000_000


def join_problem(agent: AgentId, spec: JobSpec, facts: NodeFacts) -> str:
    """Why the service rejects this join; empty if it does not."""
    names = (
        (spec.job_id, "the job id (--rdzv-id)", JOB_ID_CHARS),
        (agent.node, "the node name", NAME.max_chars),
        (agent.incarnation, "the incarnation", NAME.max_chars),
    )
    for name, what, max_chars in names:
        if problem := _name_problem(name, what, max_chars):
            return problem
    if not 1 <= spec.min_nodes <= spec.max_nodes <= _NODES:
        return f"invalid --nnodes {spec.min_nodes}:{spec.max_nodes}: use MIN:MAX with 1 <= MIN <= MAX <= {_NODES}"
    if not 1 <= facts.nproc <= _RANKS_PER_NODE:
        return f"invalid --nproc-per-node {facts.nproc} on {agent.node}: use 1 to {_RANKS_PER_NODE}"
    return _number_problem(spec)


def reported_state_problem(generation: int, running: Assignment | None) -> str:
    """Why the service rejects the generation and assignment that an agent reports; empty if it does not."""
    if not 0 <= generation <= _GENERATIONS:
        return f"the agent reports generation {generation}: expected 0 to {_GENERATIONS}"
    if running is None:
        return ""
    if running.generation != generation or not 0 <= running.node_rank < running.n_nodes <= _NODES:
        return (
            f"the agent reports an invalid assignment: node rank {running.node_rank} of {running.n_nodes} nodes "
            f"in generation {running.generation}"
        )
    return ""


def _name_problem(name: str, what: str, max_chars: int) -> str:
    if not 0 < len(name) <= max_chars:
        return f"{what} has {len(name)} characters; use 1 to {max_chars}"
    if not name.isprintable():
        return f"{what} {name!r} contains control characters; remove them"
    return ""


def _number_problem(spec: JobSpec) -> str:
    ranges = (
        ("the lease", spec.lease_s, 0.1, 3600.0),
        ("--join-timeout", spec.join_timeout_s, 0.0, _YEAR_S),
        ("--last-call", spec.last_call_s, 0.0, _YEAR_S),
        ("the maximum of --last-call", spec.last_call_bound_s, 0.0, _YEAR_S),
        ("--replacement-timeout", spec.replacement_timeout_s, 0.0, _YEAR_S),
        ("--shrink-after", spec.shrink_after_s, 0.0, _YEAR_S),
        ("--shutdown-timeout", spec.stop_budget_s, 0.1, _YEAR_S),
        ("the time for which a node is excluded", spec.node_cooldown_s, 0.1, _YEAR_S),
        ("the window of --max-restarts", _window_s(spec.budget), 0.1, _YEAR_S),
        ("--max-restarts", spec.budget.limit, 0, _COUNT),
        ("the window of --max-heals", _window_s(spec.heal_budget), 0.1, _YEAR_S),
        ("--max-heals", spec.heal_budget.limit, 0, _COUNT),
        ("--spares", spec.spares, 0, _NODES),
        ("the number of failures that exclude a node", spec.node_failure_limit, 0, _COUNT),
        ("the number of --failure-policy rules", len(spec.rules), 0, 1000),
    )
    for what, value, low, high in ranges:
        if not low <= value <= high:
            return f"{what} is {value:,.10g}: use {low:,.10g} to {high:,.10g}"
    return ""


def _window_s(budget: RestartBudget) -> float:
    return _YEAR_S if budget.window_s is None else budget.window_s
