"""What one agent knows of its node's ranks and of its place in the job: the state of launcher/supervision.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from launcher.exchange import Action

if TYPE_CHECKING:
    from launcher.exchange import Finish, StopRequested
    from rendezvous.values.events import AgentJoined
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.types import AgentId, Assignment, StoreAddress


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
    live: tuple[int, ...] = ()  # local ranks that have not ended
    store_told: bool = False  # this generation's store is known to the others
    store: StoreAddress | None = None  # of this generation, once it is known here
    checkpoint: str = ""  # the service asks this generation's ranks for one, and why
    preempted: StopRequested | None = None  # to be carried out when the ranks have taken a checkpoint
    over: bool = False  # this generation was stopped here; what still speaks of it comes late
    job_failed: bool = False  # it ends once everything everywhere is stopped
    accused: tuple[int, ...] = ()  # local ranks that were found to be the reason why ranks stand still
    last_seen: tuple[
        RankReport, ...
    ] = ()  # where its ranks were when the order to stop came, if that was asked
    stop_signal: int = 0  # the signal we last sent the ranks
    join: AgentJoined | None = None  # what to say again when the service has given us up
    rejoins: bool = False  # it did: join anew once everything here is stopped
    overtaken_by: Assignment | None = None  # a world was sealed while our ranks of an older one still ran
    finish: Finish | None = None  # what to do once everything here is stopped

    @property
    def generation(self) -> int:
        return -1 if self.assignment is None else self.assignment.generation

    def awaits_store(self, generation: int) -> bool:
        return self.phase is Phase.JOINING and generation == self.generation and not self.over


Step = tuple[Supervision, tuple[Action, ...]]
