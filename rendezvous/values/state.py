"""Everything the rendezvous knows of one job.

    FORMING --seal--> SEALED --store opened--> RUNNING --all finished--> ENDED
       ^                 |                        |                        ^
       |                 +---- failure, loss, order to change the world -- | -+
       |                                          v                        |  |
       +--- too few nodes are left --- STOPPING <-+--- decision FAIL ------+--+
                                          +--- all stopped: seal g+1 ---> SEALED

What was decided is durable (written before anyone is told). What agents only said (joins, "finished",
"stopped", reports) and their leases are not: an agent says them again whenever its session resumes, so a
service that restarts from its store gathers them anew. A snapshot's instants are on the clock of the
process that wrote it, `as_of` tells how late it was there; `rendezvous.rounds.resume` moves them to another clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from rendezvous.values.frozen_map import EMPTY, FrozenMap

# At run time, not for the checker only: the codec reads these annotations.
from rendezvous.values.rank_report import RankReport  # noqa: TC001
from rendezvous.values.straggler_state import StragglerState
from rendezvous.values.types import (  # noqa: TC001
    AgentId,
    Assignment,
    Cause,
    Decision,
    JobSpec,
    NodeFacts,
    Outcome,
    StoreAddress,
    World,
)

NOT_KEPT = {"kept": False}  # a field that is no part of a snapshot: its agents say it again


class Phase(StrEnum):
    FORMING = "forming"  # a round gathers members; also after a loss, while a replacement is awaited
    SEALED = "sealed"  # a world exists; its store is not open yet
    RUNNING = "running"  # ranks may run
    STOPPING = "stopping"  # a stop was ordered; not every node has reaped yet
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Member:
    agent: AgentId
    facts: NodeFacts
    arrival: int
    node_rank: int | None = None  # in the world of the current generation; None: stands by
    ran: Assignment | None = None  # what it came with, until the next world is sealed


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A node that sits out. `until` None: until an operator resumes it."""

    reason: str
    until: float | None = None
    for_health: bool = False  # a later life of the node that brings better health lifts it


@dataclass(frozen=True, slots=True)
class Streak:
    """How many generations running this rank was the first to fail, each time soon after its start."""

    rank: int = -1
    times: int = 0


@dataclass(frozen=True, slots=True)
class Timers:
    """Instants at which something falls due; None: nothing does."""

    give_up_at: float | None = None  # FORMING: too few nodes; SEALED: no store by then
    settle_at: float | None = None  # enough nodes are here; more may follow until then
    settle_bound_at: float | None = None  # ... but no later than this
    stop_by: float | None = None  # STOPPING: who is silent by then is lost
    progress_at: float | None = None  # FORMING: tell everyone how many are here
    examine_at: float | None = None  # RUNNING: an examination goes on, with what there is by then
    lease_check_at: float | None = None
    readmit_at: float | None = None  # the first exclusion runs out

    def earliest(self) -> float | None:
        return min((at for at in self._all() if at is not None), default=None)

    def _all(self) -> tuple[float | None, ...]:
        return (
            self.give_up_at,
            self.settle_at,
            self.stop_by,
            self.progress_at,
            self.examine_at,
            self.lease_check_at,
            self.readmit_at,
        )

    def shifted(self, by_s: float) -> Timers:
        def moved(at: float | None) -> float | None:
            return None if at is None else at + by_s

        return Timers(*(moved(getattr(self, f.name)) for f in fields(self)))


class Stage(StrEnum):
    ASKING = "asking"  # not every node has said how its ranks are
    PATIENCE = "patience"  # it was found to be in order, for now
    ACCUSING = "accusing"  # the accused ranks' agents look where they stand


@dataclass(frozen=True, slots=True)
class Examination:
    """Why do ranks stand still? See rendezvous/diagnosing/examination.py."""

    stage: Stage
    asked: int = 0  # how often, one time after the other
    pending: FrozenMap[str, bool] = EMPTY  # nodes that have not answered
    reports: FrozenMap[str, tuple[RankReport, ...]] = EMPTY  # by node
    accused: FrozenMap[int, Cause] = EMPTY  # by rank: what to say if its agent does not


@dataclass(frozen=True, slots=True)
class JobState:
    spec: JobSpec | None = None
    phase: Phase = Phase.FORMING
    min_nodes: int = 1  # the spec's, until an operator resizes the job
    max_nodes: int = 1
    generation: int = 0  # of the last sealed world; the first is 1
    world: World | None = None
    role_sizes: FrozenMap[str, int] = EMPTY  # of this world
    store: StoreAddress | None = None
    members: FrozenMap[str, Member] = EMPTY  # by node
    leases: FrozenMap[str, float] = EMPTY  # node -> when last heard
    claims: FrozenMap[int, str] = EMPTY  # explicit node rank -> node
    retired: FrozenMap[str, tuple[str, ...]] = EMPTY  # node -> incarnations that will not be back
    excluded: FrozenMap[str, Exclusion] = EMPTY
    node_failures: FrozenMap[str, int] = EMPTY
    pending: FrozenMap[str, bool] = EMPTY  # nodes yet to finish (RUNNING) or to stop (STOPPING)
    checkpoints_due: FrozenMap[str, bool] = EMPTY  # nodes asked for a checkpoint, and yet to take it
    causes: FrozenMap[int, Cause] = EMPTY  # of this generation, by rank
    decision: Decision | None = None  # the one being carried out
    forgotten: int = (
        0  # a generation that agents have heard of; above `generation` if the state was lost since
    )
    arrivals: int = 0
    restarts_used: int = 0  # restarts that count against the budget, in all
    restart_times: tuple[float, ...] = ()  # when the latest of them were decided
    streak: Streak = Streak()
    decisions: tuple[Decision, ...] = ()  # the latest DECISIONS_KEPT
    failures: tuple[tuple[int, Cause], ...] = ()  # (generation, first cause), the latest FAILURES_KEPT
    outcome: Outcome | None = None
    timers: Timers = Timers()
    examination: Examination | None = field(default=None, metadata=NOT_KEPT)
    last_seen: FrozenMap[str, tuple[RankReport, ...]] = field(
        default=EMPTY, metadata=NOT_KEPT
    )  # STOPPING: by node
    straggler_state: StragglerState = field(default=StragglerState(), metadata=NOT_KEPT)  # of this generation
    health: FrozenMap[str, tuple[str, ...]] = field(default=EMPTY, metadata=NOT_KEPT)  # complaints, by node
    deadline_at: float | None = None  # what was last asked for with SetDeadline
    as_of: float = 0.0


DECISIONS_KEPT = 200
FAILURES_KEPT = 50
INCARNATIONS_KEPT = 16
CAUSES_TOLD = 256  # of one failed generation; every agent is told them all


def member_of(state: JobState, agent: AgentId) -> Member | None:
    """The member this agent is: None for a stranger, and for another life of a member's node."""
    member = state.members.get(agent.node)
    return member if member is not None and member.agent == agent else None


def is_live(state: JobState) -> bool:
    """A sealed world is being started or runs."""
    return state.phase in (Phase.SEALED, Phase.RUNNING)


def world_nodes(state: JobState) -> int:
    return len(state.world.placements) if state.world is not None else 0


def present(state: JobState) -> int:
    """Members that may take part."""
    if not len(state.excluded):
        return len(state.members)
    return len(state.members) - sum(1 for node in state.excluded if node in state.members)


def standing_by(state: JobState) -> list[Member]:
    """Members that could enter a world and are in none, longest here first."""
    found = [m for n, m in state.members.items() if m.node_rank is None and n not in state.excluded]
    return sorted(found, key=lambda m: m.arrival)
