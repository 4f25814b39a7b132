"""The state of launcher/supervision.py: the ranks of this node, and the phase of its agent."""

from __future__ import annotations

from enum import StrEnum

# At run time, not for the checker only: journals are written and read by these annotations.
from launcher.exchange import Action, Finish, StopRequested
from rendezvous.values.events import AgentJoined  # noqa: TC001
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_report import RankReport  # noqa: TC001
from rendezvous.values.text_limits import Sentence  # noqa: TC001
from rendezvous.values.types import AgentId, Assignment, Cause, StoreAddress  # noqa: TC001


class Phase(StrEnum):
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Supervision:
    agent: AgentId
    phase: Phase = Phase.JOINING
    assignment: Assignment | None = None
    live: tuple[int, ...] = ()  # local ranks that have not ended, the parked ones among them
    heals: tuple[int, ...] = ()  # local ranks that can be paused
    parked: tuple[int, ...] = ()  # local ranks that are paused
    kept: tuple[int, ...] = ()  # local ranks whose processes are older than this generation
    is_ready: bool = False  # the service knows that all live ranks can be paused
    missed: int = -1  # the last generation that this node missed, and whose stop it has answered
    in_place: bool = False  # this stop pauses ranks where that is possible
    is_sweeping: bool = False  # all ranks are parked or have ended, in a stop in place
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
        return self.phase is Phase.RUNNING and self.preempted is None

    def awaits_store(self, generation: int) -> bool:
        return self.phase is Phase.JOINING and generation == self.generation and not self.over


Step = tuple[Supervision, tuple[Action, ...]]
