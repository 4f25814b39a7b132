"""The values of the agent's state machine: events of the node, actions for the agent, and the state of its ranks."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

# At run time, not for the checker only: journals are written and read by these annotations.
from rendezvous.values.error_codes import Code
from rendezvous.values.events import AgentJoined, FromAgent, ToAgent
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import RankReport
from rendezvous.values.text_limits import Sentence
from rendezvous.values.types import AgentId, Assignment, Cause, Outcome, StoreAddress


class Grace(StrEnum):
    """A time that ranks have after a signal; see launcher/supervision.py."""

    FULL = "full"
    OF_ACCUSED = "of accused"  # short: these ranks have had their time
    TOGETHER = "together"  # to complete their collectives
    LAST = "last"  # after SIGTERM, for ranks that did not end on SIGINT
    UNASKED = "unasked"  # for the report of the failure that made a rank park


# --- events of this node ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreListens:
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The requested port is not available."""

    generation: int
    reason: Sentence


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The store of this generation, which this node keeps, has ended."""

    generation: int
    reason: Sentence


@dataclass(frozen=True, slots=True)
class StoreReached:
    """Whether this node can connect to the store: `problem` has the reason if not, and is empty if it can."""

    generation: int
    problem: Sentence = ""


@dataclass(frozen=True, slots=True)
class GpusFound:
    """This node has GPUs whose memory can be read."""


@dataclass(frozen=True, slots=True)
class NodePrepared:
    """Ranks of this generation can start on this node; see launcher/before_restart.py."""

    generation: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """If `cause` is None, the rank succeeded."""

    generation: int
    local_rank: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class RankHeals:
    """Whether a rank can be paused, because it is inside `State.run`; see launcher/supervision.py."""

    generation: int
    local_rank: int
    heals: bool


@dataclass(frozen=True, slots=True)
class CannotHeal:
    """A rank reports why ranks of this script cannot keep their processes."""

    generation: int
    local_rank: int
    reason: Sentence


@dataclass(frozen=True, slots=True)
class RankParked:
    """A rank has left all collectives, and waits to continue in another generation."""

    generation: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Swept:
    """All processes that the ended ranks of this generation started have ended."""

    generation: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    generation: int
    kind: Grace = Grace.FULL


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal that ends the job reached this agent."""

    signum: int
    name: str


@dataclass(frozen=True, slots=True)
class CheckpointSignal:
    """The scheduler announced that it will take this node. `stop`: the stop that follows the checkpoint, if any."""

    name: str
    stop: StopRequested | None


@dataclass(frozen=True, slots=True)
class CheckpointOver:
    """Every rank of this node has taken the requested checkpoint, or its time limit has passed."""

    generation: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Isolated:
    """The service is unreachable and the ranks make no progress, both for `--isolation-timeout`."""

    reason: Sentence


@dataclass(frozen=True, slots=True)
class StallDetected:
    """A rank may hang: it waits for others, is idle, or has exceeded a limit of `--hang-timeout`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """The state of all ranks of this node; the answer to `InspectRanks`."""

    generation: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class LastInspected:
    """The state of the ranks before they are stopped; the answer to `InspectLast`."""

    generation: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """The stack of a rank that was identified as the cause, if it could be read: in the cause's traceback."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class CommunicationFailed:
    """A rank's process group reports an error while the rank itself still waits."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class ConditionMet:
    """A condition of `--stop-when` is true for a rank that still runs."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class ZygoteReplaced:
    """The zygote died, and its ranks and the store died too.

    Comes after their `RankEnded`, with a new zygote running.
    """

    reason: Sentence
    exit_code: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """No rank can be started on this node, and no rank is running."""

    reason: Sentence


AgentEvent = (
    ToAgent
    | GpusFound
    | NodePrepared
    | StoreListens
    | StoreFailed
    | StoreLost
    | StoreReached
    | RankEnded
    | RankHeals
    | CannotHeal
    | RankParked
    | Swept
    | GraceOver
    | StopRequested
    | CheckpointSignal
    | CheckpointOver
    | Isolated
    | StallDetected
    | Inspected
    | LastInspected
    | StacksTaken
    | CommunicationFailed
    | ConditionMet
    | ZygoteReplaced
    | StartFailed
)

# --- actions for the agent -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    message: FromAgent


@dataclass(frozen=True, slots=True)
class OpenStore:
    generation: int


@dataclass(frozen=True, slots=True)
class PrepareNode:
    """Before the ranks of this assignment start. `frees_memory`: wait for GPU memory of the ranks before."""

    assignment: Assignment
    frees_memory: bool


@dataclass(frozen=True, slots=True)
class ReachStore:
    assignment: Assignment
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class AskCheckpoint:
    """`has_deadline`: the checkpoint must be complete within `--checkpoint-grace`."""

    assignment: Assignment
    reason: Sentence
    has_deadline: bool


@dataclass(frozen=True, slots=True)
class StartRanks:
    """`kept`: local ranks that are parked and continue; the others are started."""

    assignment: Assignment
    store: StoreAddress
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PauseRanks:
    """Let these local ranks leave their collectives and park."""

    generation: int
    local_ranks: tuple[int, ...]
    reason: Sentence


@dataclass(frozen=True, slots=True)
class AbortGroups:
    """Abort the collectives of ranks that wait for lost peers; they get the reason."""

    generation: int
    reason: Sentence
    only: tuple[int, ...] | None = None  # of these local ranks; None: of all


@dataclass(frozen=True, slots=True)
class SignalRanks:
    signum: int
    only: tuple[int, ...] | None = None  # these local ranks; None: all


@dataclass(frozen=True, slots=True)
class StartGrace:
    generation: int
    kind: Grace = Grace.FULL


@dataclass(frozen=True, slots=True)
class InspectRanks:
    generation: int


@dataclass(frozen=True, slots=True)
class InspectLast:
    """Read the state of ranks that will be stopped, and the last state of ranks that have ended."""

    generation: int


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Take the stacks of the rank of the cause, and of its child processes."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Sweep:
    """End what ranks have left behind, except what belongs to the local ranks in `kept`.

    `hurried`: processes in a session of their own get no time either.
    """

    generation: int
    hurried: bool = False
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The agent ends. If `outcome` is None, it was stopped, or the service rejected it: see `reason`."""

    exit_code: int
    reason: Sentence = ""
    outcome: Outcome | None = None
    code: Code | None = None  # of the error that `reason` tells


Action = (
    Send
    | PrepareNode
    | OpenStore
    | ReachStore
    | StartRanks
    | AskCheckpoint
    | InspectRanks
    | InspectLast
    | TakeStacks
    | PauseRanks
    | AbortGroups
    | SignalRanks
    | StartGrace
    | Sweep
    | Finish
)


# --- the state -------------------------------------------------------------------------------------
#
# The ranks of this node, and the phase of its agent.


class AgentPhase(StrEnum):
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Supervision:
    agent: AgentId
    phase: AgentPhase = AgentPhase.JOINING
    assignment: Assignment | None = None
    live: tuple[int, ...] = ()  # local ranks that have not ended, the parked ones among them
    heals: tuple[int, ...] = ()  # local ranks that can be paused
    parked: tuple[int, ...] = ()  # local ranks that are paused
    kept: tuple[int, ...] = ()  # local ranks whose processes are older than this generation
    is_ready: bool = False  # the service knows that all live ranks can be paused
    missed: int = -1  # the last generation that this node missed, and whose stop it has answered
    in_place: bool = False  # this stop pauses ranks where that is possible
    is_sweeping: bool = False  # all ranks are parked or have ended, in a stop in place
    has_gpus: bool = False  # whose memory can be read
    is_prepared: bool = True  # the ranks of this assignment can start on this node
    store_told: bool = False  # the other nodes have the address of this generation's store
    store: StoreAddress | None = None  # of this generation, after this agent has received its address
    checkpoint: Sentence = ""  # why the service requests a checkpoint from the ranks of this generation
    preempted: StopRequested | None = None  # to carry out after the ranks have taken a checkpoint
    over: bool = False  # this generation was stopped here; later events about it are ignored
    job_failed: bool = False  # the job ends after all nodes have stopped
    accused: tuple[Cause, ...] = ()  # of a hang; each names a local rank
    last_seen: tuple[RankReport, ...] = ()  # the state of the ranks before the stop, if it was read
    stop_signal: int = 0  # the last signal sent to the ranks
    is_interrupted: bool = False  # a person pressed Ctrl-C, on this node or another one
    is_hurried: bool = False  # a stop signal was repeated
    join: AgentJoined | None = None  # the message to send again if the service has declared this node lost
    rejoins: bool = False  # the node was declared lost: join again after its ranks are stopped
    overtaken_by: Assignment | None = None  # a new generation, received while ranks of the old one still ran
    finish: Finish | None = None  # the action after the ranks of this node are stopped

    @property
    def generation(self) -> int:
        return -1 if self.assignment is None else self.assignment.generation

    @property
    def accused_ranks(self) -> tuple[int, ...]:
        return tuple(cause.local_rank for cause in self.accused)

    @property
    def has_stopped(self) -> bool:
        """Whether no rank runs. In a stop in place, parked ranks do not count."""
        return not self.live or (self.in_place and set(self.live) == set(self.parked))

    @property
    def trains_undisturbed(self) -> bool:
        """Whether ranks run, and no signal is about to stop them."""
        return self.phase is AgentPhase.RUNNING and self.preempted is None

    def awaits_store(self, generation: int) -> bool:
        return self.phase is AgentPhase.JOINING and generation == self.generation and not self.over


Step = tuple[Supervision, tuple[Action, ...]]


class AgentStep(NamedTuple):
    """What the state machine of the agent has made of an event."""

    event: AgentEvent
    before: Supervision
    after: Supervision
    actions: tuple[Action, ...]


class StepObserver(Protocol):
    """Sees each step of the agent, before its actions are carried out, and decides nothing."""

    def observe(self, step: AgentStep) -> None: ...
