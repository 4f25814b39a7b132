"""The state of one job.

    FORMING --seal--> SEALED --store opened--> RUNNING --all finished--> ENDED
       ^                 |                        |                        ^
       |                 +---- failure, loss, order to change the world -- | -+
       |                                          v                        |  |
       +--- too few nodes are left --- STOPPING <-+--- decision FAIL ------+--+
                                          +--- all stopped: seal g+1 ---> SEALED

Decisions are durable: the service writes them before it sends them to any agent. Messages of agents (joins, "finished",
"stopped", reports) and their leases are not durable. An agent sends its messages again when its session resumes, so a
service that restarts from its store collects them again. The times in a snapshot use the monotonic clock of the process
that wrote it, and `as_of` is the time of the snapshot. `admission.resume` converts the times to another clock.
"""

from __future__ import annotations

from dataclasses import field, fields
from enum import StrEnum

from rendezvous.values.events import Effect
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import StragglerState, TimeState
from rendezvous.values.rank_view import RankReport

# At run time, not for the checker only: the codec reads these annotations.
from rendezvous.values.text_limits import Sentence, ShortenedSentence
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    JobSpec,
    NodeFacts,
    Outcome,
    Reached,
    SavedState,
    StoreAddress,
    World,
)

NOT_KEPT = {"kept": False}  # a field that is not part of a snapshot: the agents send it again


class Phase(StrEnum):
    FORMING = "forming"  # a round collects members; also after a loss, while the job waits for a replacement
    SEALED = "sealed"  # the nodes and ranks of a world are fixed; its TCPStore is not open yet
    RUNNING = "running"  # ranks may run
    STOPPING = "stopping"  # a stop was ordered; not every node has reaped its ranks yet
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Member:
    agent: AgentId
    facts: NodeFacts
    arrival: int
    node_rank: int | None = None  # in the world of the current generation; None: stands by
    ran: Assignment | None = None  # its place when it joined, until the next world is sealed


@dataclass(frozen=True, slots=True)
class Exclusion:
    """The exclusion of a node. If `until` is None, it lasts until an operator resumes the node."""

    reason: ShortenedSentence
    until: float | None = None
    for_health: bool = False  # a new agent of the node that reports good health ends it


@dataclass(frozen=True, slots=True)
class Streak:
    """The number of generations in a row in which this rank was the first to fail, soon after its start."""

    rank: int = -1
    times: int = 0


@dataclass(frozen=True, slots=True)
class Standstill:
    """Failed generations in a row without a further step. See rendezvous/rounds/policy.py."""

    times: int = 0
    step: int | None = None  # the most that a rank of the last of them has finished
    numbered: bool = False  # `step` is the script's own count
    highest: int = 0  # of all generations, by the script's own count
    stepped: bool = False  # some generation has finished a step
    manner: str = ""  # how the last of them failed


@dataclass(frozen=True, slots=True)
class Timers:
    """The time at which each timeout expires; None: it is not set."""

    give_up_at: float | None = None  # FORMING: too few nodes; SEALED: the store is not open
    settle_at: float | None = None  # enough nodes are present; more may join until then
    settle_bound_at: float | None = None  # ... but no later than this
    stop_by: float | None = None  # STOPPING: a node that has not answered by then is lost
    progress_at: float | None = None  # FORMING: send all agents the number of nodes that have joined
    examine_at: float | None = None  # RUNNING: the examination continues with the answers so far
    lease_check_at: float | None = None
    readmit_at: float | None = None  # the first exclusion expires

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
    ASKING = "asking"  # not every node has reported its ranks
    PATIENCE = "patience"  # there is no problem yet; ask again later
    ACCUSING = "accusing"  # the agents of the accused ranks examine the stacks


@dataclass(frozen=True, slots=True)
class Examination:
    """The examination of a stall. See rendezvous/rounds/hang_examination.py."""

    stage: Stage
    asked: int = 0  # how many times in a row the service has asked
    pending: FrozenMap[str, bool] = EMPTY  # nodes that have not answered
    reports: FrozenMap[str, tuple[RankReport, ...]] = EMPTY  # by node
    accused: FrozenMap[int, Cause] = EMPTY  # by rank: the cause to use if its agent does not answer


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
    leases: FrozenMap[str, float] = EMPTY  # node -> time of its last message
    claims: FrozenMap[int, str] = EMPTY  # explicit node rank -> node
    retired: FrozenMap[str, tuple[str, ...]] = EMPTY  # node -> incarnations that may not join again
    excluded: FrozenMap[str, Exclusion] = EMPTY
    node_failures: FrozenMap[str, int] = EMPTY
    pending: FrozenMap[str, bool] = EMPTY  # nodes that have not finished (RUNNING) or stopped (STOPPING)
    checkpoints_due: FrozenMap[str, bool] = EMPTY  # nodes that have not taken the requested checkpoint
    causes: FrozenMap[int, Cause] = EMPTY  # of this generation, by rank
    decision: Decision | None = None  # the decision that is being carried out
    ready: FrozenMap[str, bool] = EMPTY  # nodes of this generation whose ranks can be paused
    refusal: ShortenedSentence = ""  # why this job cannot be healed in place
    parked: FrozenMap[str, tuple[int, ...]] = EMPTY  # by node: local ranks that the last stop has paused
    forgotten: int = 0  # the latest generation that agents report; above `generation` if the state was lost
    arrivals: int = 0
    restarts_used: int = 0  # all restarts that count against the budget
    restart_times: tuple[float, ...] = ()  # the times of the latest of these decisions
    heals_used: int = 0  # the same for decisions in place that follow a failure
    heal_times: tuple[float, ...] = ()
    streak: Streak = Streak()
    standstill: Standstill = Standstill()
    decisions: tuple[Decision, ...] = ()  # the latest DECISIONS_KEPT
    failures: tuple[tuple[int, Cause], ...] = ()  # (generation, first cause), the latest FAILURES_KEPT
    outcome: Outcome | None = None
    timers: Timers = Timers()
    imports: tuple[str, ...] = field(
        default=(), metadata=NOT_KEPT
    )  # that ranks have begun, for standby nodes
    examination: Examination | None = field(default=None, metadata=NOT_KEPT)
    last_seen: FrozenMap[str, tuple[RankReport, ...]] = field(
        default=EMPTY, metadata=NOT_KEPT
    )  # STOPPING: by node
    saved: FrozenMap[str, SavedState] = EMPTY  # by node: of the last generation that has saved anything
    saved_in: int = 0  # that generation
    reached: FrozenMap[str, Reached] = field(default=EMPTY, metadata=NOT_KEPT)  # STOPPING: by node
    straggler_state: StragglerState = field(default=StragglerState(), metadata=NOT_KEPT)  # of this generation
    health: FrozenMap[str, tuple[Sentence, ...]] = field(
        default=EMPTY, metadata=NOT_KEPT
    )  # complaints, by node
    time: TimeState = field(default=TimeState(), metadata=NOT_KEPT)
    unfit: FrozenMap[str, Sentence] = field(
        default=EMPTY, metadata=NOT_KEPT
    )  # by node: why it should not be chosen
    deadline_at: float | None = None  # the last deadline set with SetDeadline
    as_of: float = 0.0


DECISIONS_KEPT = 200
FAILURES_KEPT = 50
INCARNATIONS_KEPT = 16
MAX_CAUSES = 256  # of one failed generation; every agent gets them all


def member_of(state: JobState, agent: AgentId) -> Member | None:
    """The member with this agent. None if the agent is unknown, or if the node has another agent now."""
    member = state.members.get(agent.node)
    return member if member is not None and member.agent == agent else None


def is_live(state: JobState) -> bool:
    """Whether a sealed world is starting or running."""
    return state.phase in (Phase.SEALED, Phase.RUNNING)


def world_nodes(state: JobState) -> int:
    return len(state.world.placements) if state.world is not None else 0


def present(state: JobState) -> int:
    """The number of members that are not excluded."""
    if not len(state.excluded):
        return len(state.members)
    return len(state.members) - sum(1 for node in state.excluded if node in state.members)


def standing_by(state: JobState) -> list[Member]:
    """Members that are not in a world and could enter one, in order of arrival."""
    found = [m for n, m in state.members.items() if m.node_rank is None and n not in state.excluded]
    return sorted(found, key=lambda m: m.arrival)


# --- parts of the state that the rules often need ---------------------------------------------------

Result = tuple[JobState, tuple[Effect, ...]]


def spec_of(state: JobState) -> JobSpec:
    assert state.spec is not None, "internal error: the job has no spec"
    return state.spec


def world_of(state: JobState) -> World:
    assert state.world is not None, "internal error: the job has no world"
    return state.world


def by_arrival(state: JobState) -> list[Member]:
    return sorted(state.members.values(), key=lambda m: m.arrival)
