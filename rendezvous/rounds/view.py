"""Views of a job's state for users. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rendezvous.diagnosing import goodput
from rendezvous.diagnosing.stragglers import in_words
from rendezvous.rounds.event_log import Past, TimePoint
from rendezvous.rounds.policy import outcome_text
from rendezvous.values.job_state import JobState, Member, Phase, present, world_nodes
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import JobTime, RankTime
from rendezvous.values.text_limits import Sentence, ShortenedSentence

# At run time, not for the checker only: the codec reads these annotations.
from rendezvous.values.types import Cause, Decision, JobSpec, Outcome, StoreAddress

_UNKNOWN = Past()


@dataclass(frozen=True, slots=True)
class JobSummary:
    job_id: str
    phase: Phase
    generation: int = 0
    nodes: int = 0
    members: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    world_size: int = 0
    restarts: int = 0
    reason: ShortenedSentence = ""
    succeeded: bool = False
    heals: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    goodput: float | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    node: str
    incarnation: str = ""
    address: str = ""
    nproc: int = 0
    role: str = ""
    node_rank: int | None = None
    rank_offset: int | None = None
    heard_s: float = 0.0
    present: bool = False
    excluded: Sentence = ""
    failures: int = 0
    pending: bool = False
    health: tuple[Sentence, ...] = ()
    block: str = ""
    hardware: Sentence = ""
    slow_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class JobView:
    summary: JobSummary
    spec: JobSpec | None = None
    nodes: tuple[NodeView, ...] = ()
    store: StoreAddress | None = None
    decisions: tuple[Decision, ...] = ()
    failures: tuple[Failure, ...] = ()
    outcome: Outcome | None = None
    ranks: tuple[RankTime, ...] = ()  # of the present world, as far as their agents have reported
    time: JobTime | None = None  # of all ranks together; None: nothing is known
    points: tuple[TimePoint, ...] = ()


def summary_of(job_id: str, state: JobState, past: Past = _UNKNOWN) -> JobSummary:
    return JobSummary(
        job_id=job_id,
        phase=state.phase,
        generation=state.generation,
        nodes=0 if state.phase in (Phase.FORMING, Phase.ENDED) else world_nodes(state),
        members=present(state) if state.phase is Phase.FORMING else len(state.members),
        min_nodes=state.min_nodes,
        max_nodes=state.max_nodes,
        world_size=state.world.size if state.world is not None else 0,
        restarts=state.restarts_used,
        reason=_reason(state),
        succeeded=state.outcome is not None and state.outcome.succeeded,
        heals=state.heals_used,
        began_at=past.began_at,
        ended_at=past.ended_at,
        goodput=_goodput(state.outcome),
    )


def _goodput(outcome: Outcome | None) -> float | None:
    if outcome is None or outcome.time is None or outcome.time.spent.total <= 0:
        return None
    return outcome.time.spent.goodput or None  # 0: its ranks have shown no steps


def _reason(state: JobState) -> str:
    if state.outcome is not None:
        return outcome_text(state.outcome)
    if state.decision is not None:
        return state.decision.reason
    if state.phase is Phase.FORMING:
        return f"{present(state)} of {state.min_nodes} nodes have joined"
    return ""


def view_of(
    job_id: str,
    state: JobState,
    now: float,
    past: Past = _UNKNOWN,
    heard: Mapping[str, float] | None = None,
    points_after: float | None = None,
) -> JobView:
    """`heard`: when heartbeats have arrived since leases were renewed. Without `points_after`: no points."""
    placements = state.world.placements if state.world is not None else ()
    nodes = [_node(state, m, now, heard or {}) for m in sorted(state.members.values(), key=_order)]
    away = sorted(node for node in state.excluded if node not in state.members)
    nodes += [NodeView(n, excluded=state.excluded[n].reason, failures=_failures(state, n)) for n in away]
    return JobView(
        summary=summary_of(job_id, state, past),
        spec=state.spec,
        nodes=tuple(nodes),
        store=state.store,
        decisions=state.decisions,
        failures=tuple(Failure(generation, cause) for generation, cause in state.failures),
        outcome=state.outcome,
        ranks=goodput.ranks_of(state.time, [p.agent.node for p in placements]),
        time=state.outcome.time if state.outcome is not None else goodput.whole(state.time),
        points=() if points_after is None else tuple(each for each in past.points if each.at > points_after),
    )


def _order(member: Member) -> tuple[bool, int]:
    rank = member.node_rank
    return (rank is None, member.arrival if rank is None else rank)


def _node(state: JobState, member: Member, now: float, heard: Mapping[str, float]) -> NodeView:
    node, facts, rank = member.agent.node, member.facts, member.node_rank
    exclusion = state.excluded.get(node)
    place = state.world.placements[rank] if rank is not None and state.world is not None else None
    slow = sorted(pair for pair in state.straggler_state.named if pair[1].node == node)
    return NodeView(
        node=node,
        incarnation=member.agent.incarnation,
        address=facts.address,
        nproc=facts.nproc,
        role=facts.role,
        node_rank=rank,
        rank_offset=place.rank_offset if place is not None else None,
        heard_s=max(0.0, now - max(heard.get(node, 0.0), state.leases.get(node, now))),
        present=True,
        excluded=exclusion.reason if exclusion is not None else "",
        failures=_failures(state, node),
        pending=node in state.pending,
        health=(
            *state.health.get(node, ()),
            *(in_words(slow_rank, node, each.slowness) for slow_rank, each in slow),
        ),
        block=facts.block,
        hardware=facts.hardware,
        slow_ranks=tuple(slow_rank for slow_rank, _ in slow),
    )


def _failures(state: JobState, node: str) -> int:
    return state.node_failures.get(node, 0)
