"""What is known of one rank at a moment: the value that its page is read into, and that a hang is judged by.

Whoever makes one has looked at the rank's page and at its process. Durations are seconds before that moment, since the
clocks of two hosts have nothing in common. `known` is false for a rank that has never written its page: a program
that is not ours to look into, or one that has only just been started. Of such a rank only `process` means anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RankPhase(StrEnum):
    """What a rank is doing. The order is that of the numbers on the page."""

    STARTING = "starting"  # until something else is heard of it
    DATA = "data"  # it asks its data loader for a batch
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATE = "communicate"  # it waits for others, in a collective
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"  # the section that is called "eval" or "evaluation"
    SECTION = "section"  # any other that the script names
    IDLE = "idle"  # between two phases: code of the script that nobody gave a name
    EXITING = "exiting"  # the script is over


@dataclass(frozen=True, slots=True)
class Collective:
    """One that a rank has entered. Ranks that do the same agree in all but `number`, `is_async` and the times."""

    number: int  # among all that this rank has entered, from 1
    group: str  # torch's name of the group, the same on all its members
    seq: int  # among those of this group, from 1
    op: str  # "all_reduce"
    dtype: str = ""
    numel: int = 0
    shape: int = 0  # hash of the shapes
    peer: int = -1  # global rank: of a send or receive the other side, of a broadcast the root
    is_async: bool = False
    entered_s: float = 0.0  # ago
    finished_s: float | None = None  # ago; None: it has not been seen to finish


@dataclass(frozen=True, slots=True)
class GroupView:
    """A process group that this rank has used."""

    name: str
    size: int
    members: str = (
        ""  # global ranks: "0-3", "0-6/2" for every second, "0,3,5"; "" where that would be too long
    )
    entered: int = 0  # the seq of the last collective in it
    finished: int = 0  # how many of them have finished


@dataclass(frozen=True, slots=True)
class Buckets:
    """Of the backward that is running, or ran last."""

    of: int
    launched: int
    finished: int
    launched_s: float = 0.0  # ago: the last one
    finished_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Section:
    """What the script says of itself by ddp.section()."""

    name: str
    timeout_s: float | None  # its own budget; None: none was named
    since_s: float  # ago


HELD = ("T", "t", "F")  # process states in which it cannot go on before somebody outside lets it


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What the operating system says of the rank's process."""

    alive: bool = True
    # R running, S asleep, D uninterruptible, T stopped, t traced, F frozen by its cgroup, Z ended; ? cannot be told
    state: str = "?"
    cpu_s: float = 0.0  # of all its threads and of the children that it has waited for
    cpu_moved: bool = True  # more than an idle process uses, since the look before
    wchan: str = ""  # where in the kernel its main thread sleeps, where that may be read


@dataclass(frozen=True, slots=True)
class RankView:
    rank: int
    pid: int = 0
    known: bool = False
    phase: RankPhase = RankPhase.STARTING
    phase_s: float = 0.0  # how long it has been in it
    quiet_s: float = 0.0  # since it last wrote anything at all
    step: int = 0  # how many it has finished
    step_s: float = 0.0  # since the last one was finished, or since the rank began
    last_step_s: float = 0.0
    mean_step_s: float = 0.0  # of the last dozen or so; 0.0 before the second step is over
    phase_times: tuple[
        tuple[RankPhase, float], ...
    ] = ()  # in all, with what the running phase has taken so far
    buckets: Buckets | None = None
    collectives: tuple[Collective, ...] = ()  # the last 16, oldest first
    groups: tuple[GroupView, ...] = ()
    group_timeout_s: float = 0.0  # the longest that any of its groups waits for its ranks; 0.0: none is known
    section: Section | None = None
    message: str = ""
    error: str = ""
    process: ProcessView = ProcessView()

    @property
    def waiting_in(self) -> tuple[Collective, ...]:
        """Entered and not finished, oldest first."""
        return tuple(each for each in self.collectives if each.finished_s is None)
