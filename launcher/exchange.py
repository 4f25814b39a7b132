"""The inputs and outputs of the agent's state machine: facts of the node in, actions for the shell out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.values.events import FromAgent, ToAgent

if TYPE_CHECKING:
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.types import Assignment, Cause, Outcome, StoreAddress

# --- facts of this node ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreListens:
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The requested port is not available."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The store of this generation, which this node keeps, has ended."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StoreReached:
    """Whether this node reaches the store; `problem` says why not, "" that it does."""

    generation: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RankEnded:
    """`cause` None: it succeeded."""

    generation: int
    local_rank: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class Swept:
    """Nothing that the generation's ranks had started is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    generation: int
    of_accused: bool = False  # only theirs


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal that ends the job reached this agent."""

    signum: int
    name: str


@dataclass(frozen=True, slots=True)
class CheckpointSignal:
    """The scheduler says that this node is about to go. `stop`: what else the signal means, once that is done."""

    name: str
    stop: StopRequested | None


@dataclass(frozen=True, slots=True)
class CheckpointOver:
    """Every rank of this node has taken the checkpoint that was asked for, or the time for it is up."""

    generation: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Isolated:
    """The service is unreachable and the ranks make no progress, both for `--isolation-timeout`."""

    reason: str


@dataclass(frozen=True, slots=True)
class StallDetected:
    """A rank has made no progress for longer than its phase permits."""

    generation: int


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """The state of all ranks of this node, as `LookAtRanks` requested."""

    generation: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The state of the ranks before they were stopped, as `LookBack` requested."""

    generation: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """Where an accused rank stands, as far as that could be seen: in the cause's traceback."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class CommunicationFailed:
    """A rank's process group reports an error while the rank itself still waits."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class ZygoteReplaced:
    """The zygote died, its ranks and the store with it; told after their `RankEnded`. Another one serves."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """No rank can be started here, and none is left."""

    reason: str


Fact = (
    ToAgent
    | StoreListens
    | StoreFailed
    | StoreLost
    | StoreReached
    | RankEnded
    | Swept
    | GraceOver
    | StopRequested
    | CheckpointSignal
    | CheckpointOver
    | Isolated
    | StallDetected
    | RanksSeen
    | LastSeen
    | StacksTaken
    | CommunicationFailed
    | ZygoteReplaced
    | StartFailed
)

# --- what the shell is to do -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    message: FromAgent


@dataclass(frozen=True, slots=True)
class OpenStore:
    generation: int


@dataclass(frozen=True, slots=True)
class ReachStore:
    assignment: Assignment
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class AskCheckpoint:
    """`hurried`: there is a deadline."""

    assignment: Assignment
    reason: str
    hurried: bool


@dataclass(frozen=True, slots=True)
class StartRanks:
    assignment: Assignment
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Peers are lost: release the ranks that wait for them in a collective, with the reason."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SignalRanks:
    signum: int
    only: tuple[int, ...] | None = None  # these local ranks; None: all


@dataclass(frozen=True, slots=True)
class StartGrace:
    generation: int
    of_accused: bool = False  # a short one: they were given their time


@dataclass(frozen=True, slots=True)
class LookAtRanks:
    generation: int


@dataclass(frozen=True, slots=True)
class LookBack:
    """At ranks that are about to be stopped, and at what others have left."""

    generation: int


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Of the cause's rank, and of what it has started."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Sweep:
    generation: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The agent is done. `outcome` None: it was stopped or refused; `reason` says how."""

    exit_code: int
    reason: str = ""
    outcome: Outcome | None = None


Action = (
    Send
    | OpenStore
    | ReachStore
    | StartRanks
    | AskCheckpoint
    | LookAtRanks
    | LookBack
    | TakeStacks
    | BreakOff
    | SignalRanks
    | StartGrace
    | Sweep
    | Finish
)
