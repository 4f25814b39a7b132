"""What goes into the round machine, and what comes out.

Agent -> service messages are events as they stand; each carries the agent and, where it speaks of
ranks, the generation it speaks of: the fence that makes a late message harmless. Service -> agent
messages travel inside the effect `Tell`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rendezvous.values.rank_report import RankReport
from rendezvous.values.straggler_state import PhaseTimes
from rendezvous.values.text_limits import Sentence, ShortenedSentence
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    JobSpec,
    NodeFacts,
    Outcome,
    StoreAddress,
)

# --- from an agent ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentJoined:
    agent: AgentId
    spec: JobSpec
    facts: NodeFacts
    generation: int = 0  # the last one that it heard of
    running: Assignment | None = None  # its place in that one, unless its ranks were stopped


@dataclass(frozen=True, slots=True)
class AgentHeard:
    agent: AgentId


@dataclass(frozen=True, slots=True)
class AgentLeft:
    """A graceful goodbye (drain, scale-down, SIGTERM): the agent has reaped, or will reap, all its ranks."""

    agent: AgentId
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """Node rank 0's store keeper of this generation listens."""

    agent: AgentId
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank ended badly. Sent for each, those that ended because of a stop order (consequences) included."""

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
    """In answer to `Stop`: every rank of `generation` on this node, with all its descendants, is reaped.

    While the job goes on this is also the agent's wish to take part in the next generation. `reports`: where its ranks
    were when the order came, if its reason may be the consequence of something else (see diagnosing/post_mortem.py).
    """

    agent: AgentId
    generation: int
    reports: tuple[RankReport, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointTaken:
    """In answer to `CheckpointRequested`: all ranks of this node have taken one."""

    agent: AgentId
    generation: int


@dataclass(frozen=True, slots=True)
class RanksStalled:
    """Some ranks of this node show no sign of life for longer than is in order. Said again while that lasts."""

    agent: AgentId
    generation: int


@dataclass(frozen=True, slots=True)
class Examined:
    """In answer to `Examine`: all ranks of this node, those included that have ended."""

    agent: AgentId
    generation: int
    reports: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True)
class PhaseTimesReported:
    """What the ranks of this node have spent their time on, since they began. Those of which nothing is known are
    left out."""

    agent: AgentId
    generation: int
    ranks: tuple[PhaseTimes, ...]


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Something about the node has changed: `news` says what, `complaints` is all that is wrong with it now."""

    agent: AgentId
    news: Sentence
    complaints: tuple[Sentence, ...] = ()


# --- from the service's own shell, or an operator ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentLost:
    """Its stream broke and its session was not resumed, or the shell gave it up for another reason."""

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
    """Lifts a node's drain or exclusion."""

    node: str


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The instant last asked for with `SetDeadline` has come (or passed)."""


FromAgent = (
    AgentJoined
    | AgentHeard
    | AgentLeft
    | StoreOpened
    | RankFailed
    | RanksFinished
    | AgentStopped
    | CheckpointTaken
    | RanksStalled
    | Examined
    | PhaseTimesReported
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
    """Admitted, and not running yet: what for, in words (for the progress line)."""

    reason: ShortenedSentence
    present: int
    wanted: int
    stands_by: bool = (
        False  # no short wait for the last nodes: a world runs without this one, or no service answers
    )


class RefusalKind(StrEnum):
    JOB_OVER = "job-over"
    DISAGREEMENT = "disagreement"  # the job has another value for a setting


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The node asks for another value of a setting than the job has. `setting` is a field of `JobSpec`."""

    setting: str
    of_job: str
    of_node: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted. `retryable` False: trying again as it is will not help; the agent exits with `exit_code`."""

    reason: ShortenedSentence
    exit_code: int
    retryable: bool = False
    kind: RefusalKind | None = None  # None: `reason` is all there is to it
    disagreement: Disagreement | None = None


@dataclass(frozen=True, slots=True)
class Assigned:
    """A world was sealed. Node rank 0's agent now opens the store; ranks start at `StoreAt`."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class StoreAt:
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop and reap every rank of `generation`, then answer `AgentStopped`. Told to all before anyone waits."""

    generation: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The world is to grow at a checkpoint: let the ranks take one, then answer `CheckpointTaken`."""

    generation: int
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class Examine:
    """Somewhere ranks stand still: say at once how those of this node are."""

    generation: int


@dataclass(frozen=True, slots=True)
class Accused:
    """A rank of this node is held to be the reason: look where it stands, then send `RankFailed` with this cause."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Notice:
    """Nothing to do, only to be shown."""

    generation: int
    text: Sentence


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over, and nothing of it runs here any more (or must not): say so and exit."""

    outcome: Outcome


ToAgent = (
    Waiting | Refused | Assigned | StoreAt | CheckpointRequested | Examine | Accused | Notice | Stop | Ended
)

# --- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the new state with compare-and-swap. Always first: nobody is told what is not written."""


@dataclass(frozen=True, slots=True)
class Tell:
    agent: AgentId
    message: ToAgent


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Send `DeadlineReached` at `at` (the service's monotonic seconds); replaces the one before; None: none."""

    at: float | None


Effect = Persist | Tell | SetDeadline
