"""The inputs and outputs of the round machine.

A message from an agent to the service is an event. It names the agent and, if it is about ranks, their generation.
Messages of an older generation are ignored. A message from the service to an agent is sent with the effect `Tell`.
"""

from __future__ import annotations

from enum import StrEnum

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import PhaseTimes, RankTime
from rendezvous.values.rank_view import RankReport
from rendezvous.values.text_limits import Sentence, ShortenedSentence, Words
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
)

# --- from an agent ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentJoined:
    agent: AgentId
    spec: JobSpec
    facts: NodeFacts
    generation: int = 0  # the last one that the agent knows
    running: Assignment | None = None  # its place in that generation, unless its ranks were stopped


@dataclass(frozen=True, slots=True)
class AgentHeard:
    agent: AgentId
    progress: bool = (
        False  # its ranks have finished a collective with ranks of other nodes since the last one
    )


@dataclass(frozen=True, slots=True)
class AgentLeft:
    """The agent leaves gracefully (drain, scale-down, SIGTERM). It has reaped, or will reap, all its ranks."""

    agent: AgentId
    reason: ShortenedSentence
    ends_job: bool = False  # a person has interrupted the job on this node


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The TCPStore of this generation listens on node rank 0."""

    agent: AgentId
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank failed. The agent sends this for each failed rank, including consequences of a stop order."""

    agent: AgentId
    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RanksFinished:
    """All ranks of this node ended with exit code 0."""

    agent: AgentId
    generation: int


@dataclass(frozen=True, slots=True)
class AgentStopped:
    """The answer to `Stop`: every rank of `generation` on this node, with all its descendants, is reaped.

    While the job continues, this answer is also a request to join the next generation. `reports`: the state of its
    ranks when the order arrived, if its reason may be a consequence of another failure (see diagnosing/diagnosis.py).
    After a stop in place, the ranks in `parked` are not reaped but paused, and can continue in the next generation.
    """

    agent: AgentId
    generation: int
    reports: tuple[RankReport, ...] = ()
    parked: tuple[int, ...] = ()  # local ranks
    reached: Reached | None = None  # the furthest of its ranks; None: no rank has a status page
    saved: SavedState | None = None  # what its ranks have saved after the failure


@dataclass(frozen=True, slots=True)
class HealReady:
    """Whether all live ranks of this node can be paused, so that a stop in place keeps their processes.

    The agent sends this when it changes. `refusal`: why this script can never be healed in place.
    """

    agent: AgentId
    generation: int
    ready: bool
    refusal: ShortenedSentence = ""


@dataclass(frozen=True, slots=True)
class CheckpointTaken:
    """The answer to `CheckpointRequested`: all ranks of this node have taken a checkpoint."""

    agent: AgentId
    generation: int


@dataclass(frozen=True, slots=True)
class RanksStalled:
    """Some ranks of this node have stalled for longer than their limit. The agent repeats this while that lasts."""

    agent: AgentId
    generation: int


@dataclass(frozen=True, slots=True)
class Examined:
    """The answer to `Examine`: all ranks of this node, including those that have ended."""

    agent: AgentId
    generation: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class PhaseTimesReported:
    """The phase times of the ranks of this node since their start, for the ranks that have reported any."""

    agent: AgentId
    generation: int
    ranks: tuple[PhaseTimes, ...]


@dataclass(frozen=True, slots=True)
class RankTimesReported:
    """What the time of the ranks of this node was spent on since its agent began."""

    agent: AgentId
    ranks: tuple[RankTime, ...]
    imports: tuple[
        Words, ...
    ] = ()  # modules that all its ranks have begun to import, without changed variables


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """The health of the node has changed: `news` describes the change, `complaints` lists all current problems."""

    agent: AgentId
    news: Sentence
    complaints: tuple[Sentence, ...] = ()
    unfit: Sentence = ""  # why the node should not be part of the next world
    is_asked: bool = False  # a rank asks to leave the node out now (`ddp.exclude_node`)


# --- from the I/O layer of the service, or an operator -----------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent's stream broke and its session did not resume, or the service removed it for another reason."""

    agent: AgentId
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class NodeDrained:
    node: str
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class JobResized:
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class JobAborted:
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class RestartOrdered:
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class NodeResumed:
    """An operator ends the drain or exclusion of a node."""

    node: str


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The deadline of the most recent `SetDeadline` has been reached."""


FromAgent = (
    AgentJoined
    | AgentHeard
    | AgentLeft
    | StoreOpened
    | RankFailed
    | RanksFinished
    | AgentStopped
    | HealReady
    | CheckpointTaken
    | RanksStalled
    | Examined
    | PhaseTimesReported
    | RankTimesReported
    | NodeHealth
)
Event = (
    FromAgent
    | AgentLost
    | NodeDrained
    | JobResized
    | JobAborted
    | RestartOrdered
    | NodeResumed
    | DeadlineReached
)

# --- to an agent -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """The agent is admitted and does not run ranks yet. `reason` is the text of the progress line.

    Its paused ranks stay paused, unless `stands_by`.
    """

    reason: ShortenedSentence
    present: int
    wanted: int
    stands_by: bool = False  # a long wait: a world runs without this node, or no service answers
    imports: tuple[Words, ...] = ()  # what the ranks of that world have imported


class RefusalKind(StrEnum):
    JOB_OVER = "job-over"
    DISAGREEMENT = "disagreement"  # the job has another value for a setting


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The node and the job have different values of a setting. `setting` is a field of `JobSpec`."""

    setting: str
    of_job: Words
    of_node: Words


@dataclass(frozen=True, slots=True)
class Refused:
    """The agent is not admitted. If not `retryable`, another attempt cannot succeed: exit with `exit_code`."""

    reason: ShortenedSentence
    exit_code: int
    retryable: bool = False
    kind: RefusalKind | None = None  # None: only `reason` describes it
    disagreement: Disagreement | None = None


@dataclass(frozen=True, slots=True)
class Assigned:
    """A world is sealed. The agent of node rank 0 now opens the TCPStore. The message `StoreAt` starts the ranks."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class StoreAt:
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop and reap every rank of `generation`, then answer `AgentStopped`. All nodes get the order at once.

    If the decision is `in_place`, pause the ranks that can be paused instead.
    """

    generation: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The job will grow. First request a checkpoint from the ranks, then answer `CheckpointTaken`."""

    generation: int
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class Examine:
    """Some ranks have stalled: report at once the state of the ranks of this node."""

    generation: int


@dataclass(frozen=True, slots=True)
class Accused:
    """A rank of this node is the suspected cause: examine its stacks, then send `RankFailed` with this cause."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Notice:
    """Show this text to the user. No action is needed."""

    generation: int
    text: Sentence


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended, and none of its ranks may still run here: report the outcome and exit."""

    outcome: Outcome


ToAgent = (
    Waiting | Refused | Assigned | StoreAt | CheckpointRequested | Examine | Accused | Notice | Stop | Ended
)

# --- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the new state with compare-and-swap. Always the first effect: write before any message is sent."""


@dataclass(frozen=True, slots=True)
class Tell:
    agent: AgentId
    message: ToAgent


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Send `DeadlineReached` at `at` (the service's monotonic seconds). Replaces the last deadline; None removes it."""

    at: float | None


Effect = Persist | Tell | SetDeadline
