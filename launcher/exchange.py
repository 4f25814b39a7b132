"""The inputs (events of the node) and the outputs (actions for the agent) of the agent's state machine."""

from __future__ import annotations

from enum import StrEnum

# At run time, not for the checker only: journals are written and read by these annotations.
from rendezvous.values.error_codes import Code  # noqa: TC001
from rendezvous.values.events import FromAgent, ToAgent
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_report import RankReport  # noqa: TC001
from rendezvous.values.text_limits import Sentence  # noqa: TC001
from rendezvous.values.types import Assignment, Cause, Outcome, StoreAddress  # noqa: TC001


class Grace(StrEnum):
    """A time that ranks have after a signal; see launcher/stop_sequence.py."""

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
class RankEnded:
    """If `cause` is None, the rank succeeded."""

    generation: int
    local_rank: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class RankHeals:
    """Whether a rank can be paused, because it is inside `State.run`; see launcher/pausing.py."""

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
class ChangeSources:
    """Start the next ranks with the script as it was when this generation started; 0: as it is now."""

    kept_from: int


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
    | ChangeSources
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
