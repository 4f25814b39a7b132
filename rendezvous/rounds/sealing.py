"""From members to a world: when the service seals a round, with which nodes, and its messages to waiting nodes.

To seal a round is to fix the nodes of the next world and their ranks. Nodes that join later wait for the next round.

- Fixed size: the service seals the round as soon as the last node has joined.
- Elastic size: the service seals the round at once if the maximum number of nodes has joined. If only the minimum has
  joined, it first waits a short time for more (--last-call). Each new node starts this wait again, up to a maximum.
- After a stop, the target is the number of nodes of the previous world. If fewer are left, but at least the minimum,
  the service waits at most `shrink_after_s` for the others.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rendezvous.diagnosing import goodput, versions
from rendezvous.rounds import healing
from rendezvous.rounds.policy import first_cause_order, first_of, restarts_spent
from rendezvous.values.contracts import CRASH_LOOP, ENDED_BY_ORDER, INTERRUPTED, TRY_AGAIN
from rendezvous.values.events import (
    AgentJoined,
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
from rendezvous.values.job_state import (
    DECISIONS_KEPT,
    MAX_CAUSES,
    JobState,
    Member,
    Phase,
    Result,
    Timers,
    by_arrival,
    present,
    spec_of,
    world_nodes,
    world_of,
)
from rendezvous.values.rank_time import StragglerState
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    Placement,
    Recover,
    ScaleUp,
    World,
)

Candidate = tuple[AgentId, NodeFacts]
NaturalKey = tuple[tuple[int, int, str], ...]


_STORE_TIMEOUT_S = 600.0  # to open the store; a longer --join-timeout counts instead
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
            give_up_at=_store_due(world, spec_of(state), now),
            lease_check_at=state.timers.lease_check_at,
            readmit_at=state.timers.readmit_at,
        ),
    )
    messages = [Tell(p.agent, Assigned(_slice(state, p))) for p in world.placements]
    for differ in filter(None, (versions.warning(world), versions.arguments_warning(world))):
        messages += [Tell(p.agent, Notice(generation, differ)) for p in world.placements]
    left_out = [Tell(m.agent, waiting(state, m)) for m in by_arrival(state) if m.node_rank is None]
    return state, (Persist(), *messages, *left_out)


def _store_due(world: World, spec: JobSpec, now: float) -> float | None:
    """When the node that opens the store counts as lost: it imports torch first. If it is alone, no node waits."""
    return None if len(world.placements) == 1 else now + store_timeout_s(spec)


def store_timeout_s(spec: JobSpec) -> float:
    return max(spec.join_timeout_s, _STORE_TIMEOUT_S)


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
        resume_path=max(state.saved.values(), key=lambda saved: saved.step).path if len(state.saved) else "",
        check_first=_ended_in_an_uncertain_hang(state),
    )


def _why(state: JobState) -> str:
    before = _decision_before(state)
    return before.reason if before is not None else ""


def _ended_in_an_uncertain_hang(state: JobState) -> bool:
    before = _decision_before(state)
    cause = before.cause if before is not None else None
    return cause is not None and cause.failure is FailureClass.HANG and cause.uncertain


def _decision_before(state: JobState) -> Decision | None:
    """The last decision about the previous generation. The stop order contained the first one."""
    before = (d for d in reversed(state.decisions) if d.generation == state.generation - 1)
    return next(before, None) if state.generation > 1 else None


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
        return Waiting(reason, here, target, stands_by=True, imports=state.imports)
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


# --- ranks: which node gets which node rank, and where its global and role ranks begin --------------
#
# A node that stays keeps its node rank. When the world shrinks, only the nodes whose rank no longer exists move to
# free ranks. A new node that asks for a free rank with --node-rank gets it. The other new nodes get the remaining
# ranks in natural order. This is the order of the scheduler's index, then of the host name. Numbers in host names are
# compared as numbers, so node2 comes before node10. Nodes that have reported their place in the network (--topology)
# stand beside nodes of the same place.

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(text: str) -> NaturalKey:
    parts = _DIGITS.split(text)
    # Split with a group: text at even places, digits at odd ones. Digits sort before text.
    return tuple((0, int(p), "") if i % 2 else (1, 0, p) for i, p in enumerate(parts) if p)


def natural_order(candidate: Candidate) -> tuple[object, ...]:
    agent, facts = candidate
    index = facts.scheduler_index
    return (index is None, index or 0, natural_key(facts.host), natural_key(agent.node), agent.node)


def node_ranks(candidates: Sequence[Candidate], previous: Mapping[str, int]) -> dict[str, int]:
    """Node name -> node rank, 0..n-1. `previous`: the ranks in the previous world."""
    n = len(candidates)
    taken: dict[int, str] = {}
    displaced: list[Candidate] = []
    newcomers: list[Candidate] = []
    for candidate in candidates:
        rank = previous.get(candidate[0].node)
        if rank is None:
            newcomers.append(candidate)
        elif rank < n:
            taken[rank] = candidate[0].node
        else:
            displaced.append(candidate)
    newcomers = _grant_claims(newcomers, taken, n)
    displaced.sort(key=lambda c: previous[c[0].node])
    newcomers.sort(key=natural_order)
    newcomers = sorted(grouped(newcomers, _path), key=_claim)
    queue = [*displaced, *newcomers]
    paths = {candidate[0].node: _path(candidate) for candidate in candidates}
    near = {rank: paths[node] for rank, node in taken.items()}
    free = [rank for rank in range(n) if rank not in taken]
    for rank, index in seated(free, near, [_path(candidate) for candidate in queue]):
        taken[rank] = queue[index][0].node
    return {taken[rank]: rank for rank in range(n)}


def _path(candidate: Candidate) -> Path:
    return path_of(candidate[1].block)


def _claim(candidate: Candidate) -> tuple[bool, int]:
    rank = candidate[1].node_rank
    return (rank is None, rank or 0)


def _grant_claims(newcomers: list[Candidate], taken: dict[int, str], n: int) -> list[Candidate]:
    left: list[Candidate] = []
    for candidate in newcomers:
        rank = candidate[1].node_rank
        if rank is not None and rank < n and rank not in taken:
            taken[rank] = candidate[0].node
        else:
            left.append(candidate)
    return left


def form_world(generation: int, candidates: Sequence[Candidate], previous: Mapping[str, int]) -> World:
    ranks = node_ranks(candidates, previous)
    rank_offset = 0
    role_offsets: dict[str, int] = {}
    placements: list[Placement] = []
    for agent, facts in sorted(candidates, key=lambda c: ranks[c[0].node]):
        role_offset = role_offsets.get(facts.role, 0)
        placements.append(Placement(agent, facts, len(placements), rank_offset, role_offset))
        rank_offset += facts.nproc
        role_offsets[facts.role] = role_offset + facts.nproc
    return World(generation, tuple(placements))


def role_sizes(world: World) -> FrozenMap[str, int]:
    sizes: dict[str, int] = {}
    for p in world.placements:
        sizes[p.facts.role] = sizes.get(p.facts.role, 0) + p.facts.nproc
    return FrozenMap(sizes.items())


def assignment(
    world: World, place: Placement, sizes: FrozenMap[str, int], restart_count: int, max_restarts: int
) -> Assignment:
    """One node's part of the world. `sizes` are its `role_sizes`, computed once per world and not once per node."""
    return Assignment(
        generation=world.generation,
        node_rank=place.node_rank,
        n_nodes=len(world.placements),
        rank_offset=place.rank_offset,
        nproc=place.facts.nproc,
        world_size=sum(sizes.values()),
        role=place.facts.role,
        role_rank_offset=place.role_rank_offset,
        role_world_size=sizes[place.facts.role],
        restart_count=restart_count,
        max_restarts=max_restarts,
        store_host=world.placements[0].facts.address,
        store_node=world.placements[0].agent.node,
    )


# --- neighbouring node ranks for nodes that share a part of the network -----------------------------
#
# A node may say where it is in the network, as a path from the largest unit to the smallest: "pod1/rack7"
# (`--topology`). Nodes whose paths begin alike are close. Collectives exchange most data between neighbouring ranks,
# so close nodes get neighbouring ranks. A node without a path is close to no other one. Without any paths the order
# is the one of before.

T = TypeVar("T")
Path = tuple[str, ...]
_DEPTH = 8


def path_of(block: str) -> Path:
    return tuple(part for part in block.split("/") if part)[:_DEPTH]


def grouped(nodes: Sequence[T], path: Callable[[T], Path]) -> list[T]:
    """Bring nodes with the same beginnings together. `nodes` are in their usual order, which decides everything else: a
    group stands where its first node stood, and inside a group the order stays.
    """
    groups: dict[object, list[T]] = {}
    for place, node in enumerate(nodes):
        here = path(node)
        groups.setdefault(here[:1] or place, []).append(node)  # a node without a path: a group of its own
    return [
        node
        for members in groups.values()
        for node in (grouped(members, lambda each: path(each)[1:]) if len(members) > 1 else members)
    ]


def seated(free: Iterable[int], taken: Mapping[int, Path], queue: Sequence[Path]) -> list[tuple[int, int]]:
    """Pairs of a free rank and the index of its node in `queue`.

    Each rank goes to the node that shares the longest beginning with one of its neighbours. If two are as good, the
    one that fits the neighbour before goes first; then the first of the queue.
    """
    waiting: dict[Path, deque[int]] = {}
    for index, path in enumerate(queue):
        for length in range(len(path) + 1):
            waiting.setdefault(path[:length], deque()).append(index)
    ranks, seated_already, pairs = dict(taken), set[int](), []
    for rank in free:
        near = [ranks.get(rank - 1, ()), ranks.get(rank + 1, ())]
        index = _closest(near, waiting, seated_already)
        seated_already.add(index)
        ranks[rank] = queue[index]
        pairs.append((rank, index))
    return pairs


def _closest(near: Sequence[Path], waiting: Mapping[Path, deque[int]], seated_already: set[int]) -> int:
    for length in range(max(map(len, near)), -1, -1):
        for prefix in dict.fromkeys(path[:length] for path in near if len(path) >= length):
            line = waiting.get(prefix, deque())
            while line and line[0] in seated_already:
                line.popleft()
            if line:
                return line[0]
    raise AssertionError("internal error: fewer nodes than free ranks")


# --- state recovery: rebuild a job from its agents after the service has lost its state -------------
#
# A service that keeps its state in memory has lost all jobs after a restart, but their ranks may still run. So at
# each join an agent reports the last generation that it knows. If its ranks still run, it also reports its assignment
# in that generation. If the service does not know the generation, it collects the nodes again, and does not stop any
# agent during that time. When all nodes of that world have joined, each with its old place, the service seals the
# same world again under the same number. For the agents nothing changes, and their ranks continue. Any other world
# gets a number above all known ones, and its ranks are restarted. The assignments also say how many restarts and
# heals the job has used. The list of decisions is lost.


def remember_generation(state: JobState, event: AgentJoined) -> JobState:
    if event.generation <= max(state.generation, state.forgotten):
        return state
    return replace(state, forgotten=event.generation)


def is_forgotten(state: JobState) -> bool:
    """Whether agents report a generation that this state does not know."""
    return state.forgotten > state.generation


def forgotten_size(state: JobState) -> int:
    """The number of nodes of the forgotten world; 0 if no member still has ranks of that world."""
    if not is_forgotten(state):
        return 0
    sizes = (m.ran.n_nodes for m in state.members.values() if m.ran and m.ran.generation == state.forgotten)
    return max(sizes, default=0)


def next_generation(state: JobState) -> int:
    return max(state.generation, state.forgotten) + 1


def same_world_again(state: JobState, chosen: Sequence[Member]) -> World | None:
    """The forgotten world, if these nodes form exactly that world, each in its old place."""
    if not is_forgotten(state):
        return None
    held = {m.agent.node: m.ran.node_rank for m in chosen if m.ran and m.ran.generation == state.forgotten}
    if len(held) < len(chosen) or sorted(held.values()) != list(range(len(chosen))):
        return None
    world = form_world(state.forgotten, [(m.agent, m.facts) for m in chosen], held)
    return world if all(_had_this_place(world, m) for m in chosen) else None


def _had_this_place(world: World, member: Member) -> bool:
    assert member.ran is not None
    ran, place = member.ran, world.placements[member.ran.node_rank]
    size = sum(p.facts.nproc for p in world.placements)
    then = (ran.n_nodes, ran.rank_offset, ran.nproc, ran.world_size)
    return then == (len(world.placements), place.rank_offset, place.facts.nproc, size)


def with_used_restarts(state: JobState, chosen: Sequence[Member]) -> JobState:
    """The restarts and heals that these nodes know of, if the service does not."""
    for ran in (member.ran for member in chosen if member.ran is not None):
        restarts, heals = ran.restart_count - ran.heals, ran.heals
        state = replace(
            state, restarts_used=max(state.restarts_used, restarts), heals_used=max(state.heals_used, heals)
        )
    return state


def recovered_decision(state: JobState, *, again: bool) -> tuple[Decision, ...]:
    """The decision that records the recovery, for users."""
    if not is_forgotten(state):
        return ()
    generation = f"generation {state.forgotten}; `ddp-rendezvous --store` keeps it"
    lost = f"the rendezvous service had lost the state of the job ({generation})"
    if again:
        words = f"{lost}; all nodes have joined again, and their ranks continue"
        return (Decision(DecisionKind.IGNORE, words, state.forgotten),)
    return (Decision(DecisionKind.RESTART, f"{lost}; restarting the ranks", state.forgotten),)


# --- how a job ends: its outcome, and the messages to its agents ------------------------------------


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
        return end(state, failed(state, reason, first_of(state, state.causes.values())), _fail(state, reason))
    outcome = Outcome(False, reason, TRY_AGAIN, restarts=state.restarts_used)
    return end(state, outcome, _fail(state, reason))


def _fail(state: JobState, reason: str) -> Decision:
    cause = state.decision.cause if state.decision is not None else None
    return Decision(DecisionKind.FAIL, reason, state.generation, cause)


def aborted(state: JobState, decision: Decision) -> Result:
    causes = tuple(sorted(state.causes.values(), key=first_cause_order))[:MAX_CAUSES]
    code = INTERRUPTED if decision.is_interrupt else ENDED_BY_ORDER
    return end(state, Outcome(False, decision.reason, code, None, causes, state.restarts_used))


def failed(state: JobState, reason: str, first: Cause) -> Outcome:
    others = sorted((c for c in state.causes.values() if c is not first), key=first_cause_order)
    causes = (first, *others)[:MAX_CAUSES]
    return Outcome(False, reason, first.exit_code or 1, first, causes, state.restarts_used)


def looped(outcome: Outcome) -> Outcome:
    """The outcome of a job that `--crash-loop` has ended: whoever starts jobs again must not start this one."""
    return replace(outcome, exit_code=CRASH_LOOP, is_crash_loop=True)


def end(state: JobState, outcome: Outcome, decision: Decision | None = None) -> Result:
    """End the job. `decision`: recorded first, if it is not recorded yet."""
    if decision is not None:
        state = noted(state, decision)
    time = goodput.whole(state.time)
    outcome = replace(outcome, decisions=state.decisions, heals=state.heals_used, time=time)
    state = replace(state, phase=Phase.ENDED, outcome=outcome, pending=EMPTY, timers=Timers(), store=None)
    state = replace(state, examination=None)
    return state, (Persist(), *(Tell(m.agent, Ended(outcome)) for m in by_arrival(state)))


def noted(state: JobState, decision: Decision) -> JobState:
    return replace(state, decisions=(*state.decisions, decision)[-DECISIONS_KEPT:])


# --- shorten the outcome of a failed job, so that it fits into a message to thousands of agents -----
#
# Each step drops the least useful text, until the message fits. No step drops the first cause.

ENDED_BYTES = 128 * 1024


def fitted(message: ToAgent, size_of: Callable[[ToAgent], int], limit: int = ENDED_BYTES) -> ToAgent:
    if not isinstance(message, Ended):
        return message
    for shorten in (_same, _brief_decisions, _brief_causes, _few_causes, _first_cause_only):
        message = Ended(shorten(message.outcome))
        if size_of(message) <= limit:
            break
    return message


def _same(outcome: Outcome) -> Outcome:
    return outcome


def _brief_decisions(outcome: Outcome) -> Outcome:
    return replace(outcome, decisions=tuple(replace(d, cause=_brief(d.cause)) for d in outcome.decisions))


def _brief_causes(outcome: Outcome) -> Outcome:
    first = outcome.first_cause
    return replace(outcome, causes=tuple(c if c == first else _brief_cause(c) for c in outcome.causes))


def _few_causes(outcome: Outcome) -> Outcome:
    return replace(outcome, causes=outcome.causes[:32], decisions=_without_causes(outcome.decisions[-20:]))


def _first_cause_only(outcome: Outcome) -> Outcome:
    return replace(outcome, causes=outcome.causes[:1], decisions=())


def _without_causes(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    return tuple(replace(d, cause=None) for d in decisions)


def _brief(cause: Cause | None) -> Cause | None:
    return None if cause is None else _brief_cause(cause)


def _brief_cause(cause: Cause) -> Cause:
    reason, log = cause.reason[:300], cause.log[:300]
    return replace(cause, traceback="", reason=reason, hint="", log=log, suspects=())
