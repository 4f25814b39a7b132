"""What people ask the agents about their ranks (`ddpctl top`, `logs`, `stacks`), and the answers.

The service passes questions and answers on. It does not interpret them, apart from the right that a question needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Annotated

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.text_limits import ShortenedSentence, TextLimit
from rendezvous.values.types import AgentId

Answerer = Callable[["Wanted"], Awaitable["Told"]]

MOST_LOG_BYTES = 512 * 1024  # of one answer
MOST_WAIT_S = 600.0  # for an answer
REMARKS = ("remark", "first-step", "checkpoint", "profile", "logs", "drill")  # kinds in the journal
LOGS_ARE_IN = "the logs of its ranks are in "  # what a remark of the kind "logs" says, before the folder
DumpText = Annotated[str, TextLimit(256 * 1024, is_shortened=True)]


class LogStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Present:
    """The first message of an agent on the stream of questions."""

    agent: AgentId
    job_id: str


@dataclass(frozen=True, slots=True)
class CannotAnswer:
    reason: ShortenedSentence


@dataclass(frozen=True, slots=True)
class Remark:
    """A line for the journal of the job, which no question asked for."""

    generation: int
    kind: str
    text: ShortenedSentence


@dataclass(frozen=True, slots=True)
class RanksWanted:
    """What do the ranks do?"""


@dataclass(frozen=True, slots=True)
class GpuSeen:
    index: int
    memory_used: int
    memory_total: int
    utilization: int | None = None  # percent


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """A number that a script has passed to `ddp.log`. As text, because it may be NaN."""

    name: str
    step: int
    value: str


@dataclass(frozen=True, slots=True)
class LoggedWanted:
    """What the lowest rank of a node has logged since this point; or how much of the node was used."""

    after: int = 0
    of_node: bool = False


@dataclass(frozen=True, slots=True)
class LoggedPoint:
    number: int
    name: str
    step: int
    value: str
    generation: int
    at: float  # since the epoch


@dataclass(frozen=True, slots=True)
class LoggedSeen:
    points: tuple[LoggedPoint, ...]
    last: int  # the number of the last point


@dataclass(frozen=True, slots=True)
class RankSeen:
    """One rank now. Durations are seconds."""

    rank: int
    local_rank: int
    pid: int = 0
    known: bool = False  # it has written its status page
    alive: bool = True
    process: str = "?"  # as in RankReport
    phase: RankPhase = RankPhase.STARTING
    phase_s: float = 0.0
    quiet_s: float = 0.0
    step: int = 0
    step_s: float = 0.0
    last_step_s: float = 0.0
    mean_step_s: float = 0.0
    spent_s: float = 0.0  # in the phases of its steps: not in checkpoints, evaluations and sections
    waited_s: float = 0.0  # of these: for other ranks
    memory: int = 0  # bytes
    gpu: GpuSeen | None = None
    starts: int = 1
    doing: ShortenedSentence = ""
    message: ShortenedSentence = ""
    logged: tuple[LoggedValue, ...] = ()


@dataclass(frozen=True, slots=True)
class RanksSeen:
    generation: int
    restarts: int
    ranks: tuple[RankSeen, ...]
    node_use: tuple[LoggedValue, ...] = ()  # as for `LoggedWanted.of_node`, the latest


@dataclass(frozen=True, slots=True)
class StacksWanted:
    rank: int
    native: bool = False


@dataclass(frozen=True, slots=True)
class StepWanted:
    """One whole step of a rank, while it trains."""

    rank: int


@dataclass(frozen=True, slots=True)
class StepPhase:
    """Times here and below: seconds since the beginning of the step."""

    phase: RankPhase
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepCall:
    """A collective; with our reducer also a bucket."""

    op: str
    group: str
    dtype: str
    numel: int
    is_async: bool
    start_s: float
    end_s: float | None  # None: not seen to finish


@dataclass(frozen=True, slots=True)
class StepSeen:
    step: int
    duration_s: float
    phases: tuple[
        StepPhase, ...
    ]  # in order; one that was shorter than the interval of looking may be missing
    calls: tuple[StepCall, ...]


@dataclass(frozen=True, slots=True)
class Stacks:
    text: DumpText


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Up to which byte a stream of a rank was read."""

    generation: int
    rank: int
    stream: LogStream
    offset: int


@dataclass(frozen=True, slots=True)
class LogsWanted:
    ranks: tuple[int, ...] = ()  # none: all of the node
    generation: int = 0  # 0: the latest one, and with `places` also the later ones
    since_s: float | None = None
    tail: int = 0  # lines of each stream, without `since_s` and `places`
    places: tuple[LogPlace, ...] = ()
    most_bytes: int = MOST_LOG_BYTES
    wait_s: float = 0.0  # for more than is there now


@dataclass(frozen=True, slots=True)
class LogPiece:
    generation: int
    rank: int
    stream: LogStream
    at: float  # on the clock of the node; 0: unknown
    data: bytes
    lost: int = 0  # bytes before this piece that the limit of the log file has removed


@dataclass(frozen=True, slots=True)
class LogPieces:
    pieces: tuple[LogPiece, ...]
    places: tuple[LogPlace, ...]
    more: bool = False
    ended: bool = False  # the agent ends, and this is the last output


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    reason: ShortenedSentence
    wait_s: float


@dataclass(frozen=True, slots=True)
class Checkpointed:
    taken: bool  # False: not by all ranks of the node in time
    took_s: float


@dataclass(frozen=True, slots=True)
class DrillWanted:
    rank: int
    generation: int  # in which it is to fail: a request that comes twice must not end its successor
    freeze_s: float = 0.0  # 0: it is killed
    reason: ShortenedSentence = ""
    by: ShortenedSentence = ""  # set by the service

    @property
    def deed(self) -> str:
        how = f"frozen for {self.freeze_s:g} s" if self.freeze_s else "killed"
        return f"rank {self.rank} {how}: {self.reason or 'no reason given'}"


@dataclass(frozen=True, slots=True)
class Drilled:
    pid: int


@dataclass(frozen=True, slots=True)
class ProfileWanted:
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TraceWanted:
    rank: int
    name: str  # of TracePart
    offset: int


@dataclass(frozen=True, slots=True)
class TracePart:
    """A part of a compressed trace."""

    name: str
    size: int  # of the whole trace
    offset: int
    data: bytes
    steps: int = 0


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """How long the parts of a restart took on one node, in seconds; None: not known, or not yet."""

    generation: int  # that the restart has started
    detect_s: float | None = None  # from the last progress of the rank that failed to the order to stop
    stop_s: float | None = None  # until all ranks of the node had ended
    meet_s: float | None = None  # until the next world was formed
    fork_s: float | None = None  # until the processes of the ranks ran
    init_s: float | None = None  # until they began their first step
    first_step_s: float | None = None  # until they had finished it
    redo_s: float | None = None  # until they had as many steps as before
    node: str = ""  # set by the service


Wanted = (
    RanksWanted
    | StacksWanted
    | StepWanted
    | LoggedWanted
    | LogsWanted
    | CheckpointWanted
    | ProfileWanted
    | TraceWanted
    | DrillWanted
)
Told = (
    CannotAnswer | RanksSeen | Stacks | StepSeen | LogPieces | Checkpointed | TracePart | LoggedSeen | Drilled
)
FromConversation = Told | Present | Remark | RestartTimes

ACTS = (CheckpointWanted, ProfileWanted, DrillWanted)  # questions that do more than look
