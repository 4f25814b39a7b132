"""The state of one rank at one moment, decoded from its status page. The diagnosis of a hang uses it.

The values come from the rank's page and from its process. Times are given as ages, in seconds before that moment,
since the clocks of two hosts are not comparable. `known` is false for a rank that has never written its page: a program
that does not use our library, or one that has just started. For such a rank only `process` has a meaning.
"""

from __future__ import annotations

from enum import StrEnum

from rendezvous.values.late_dataclass import dataclass

# At run time, not for the checker only: the codec reads these annotations.
from rendezvous.values.text_limits import Words

# --- one moment ------------------------------------------------------------------------------------


class RankPhase(StrEnum):
    """What a rank is doing. The order is the order of the numbers on the page."""

    STARTING = "starting"  # until it reports another phase
    DATA = "data"  # it asks its data loader for a batch
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATE = "communicate"  # it waits for others, in a collective
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"  # the section with the name "eval" or "evaluation"
    SECTION = "section"  # any other section that the script names
    IDLE = "idle"  # between two phases: code of the script without a name
    EXITING = "exiting"  # the script is over


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has entered. Calls count as equal if only `number`, `is_async` and the times differ."""

    number: int  # among all collectives of this rank, from 1
    group: str  # torch's name of the group, the same on all its members
    seq: int  # among the collectives of this group, from 1
    op: str  # "all_reduce"
    dtype: str = ""
    numel: int = 0
    shape: int = 0  # hash of the shapes
    peer: int = -1  # global rank: the other side of a send or receive, the root of a broadcast
    is_async: bool = False
    entered_s: float = 0.0  # ago
    finished_s: float | None = None  # ago; None: no finish was seen


@dataclass(frozen=True, slots=True)
class GroupView:
    """A process group that this rank has used."""

    name: str
    size: int
    members: str = ""  # global ranks: "0-3", "0-6/2" for every second, "0,3,5"; "" if that is too long
    entered: int = 0  # the seq of the last collective in it
    finished: int = 0  # how many of these collectives have finished


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of the current or the last backward pass."""

    of: int
    launched: int
    finished: int
    launched_s: float = 0.0  # ago: the last one
    finished_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Section:
    """A section that the script declares with ddp.section()."""

    name: str
    timeout_s: float | None  # its own limit; None: the script sets none
    since_s: float  # ago


HELD = ("T", "t", "F")  # process states that only another process can end


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The state of the rank's process in the operating system."""

    alive: bool = True
    # R running, S sleeping, D uninterruptible, T stopped, t traced, F frozen by its cgroup, Z ended; ? unknown
    state: str = "?"
    cpu_s: float = 0.0  # of all its threads and of the children that it has waited for
    cpu_moved: bool = True  # since the last reading, more than an idle process uses
    wchan: str = ""  # where in the kernel its main thread sleeps, if readable


@dataclass(frozen=True, slots=True)
class Repeat:
    """The finished steps of earlier ranks that were lost with them, and that the ranks of this node finish again."""

    steps: int = 0  # by the rank's own count
    up_to: int = 0  # as the script numbers its steps; 0: it does not


NO_REPEAT = Repeat()
BINS = 24
SHORTEST_S = 15.625e-6  # the limit of the first bin; each other has twice the limit of the one before


@dataclass(frozen=True, slots=True)
class Histogram:
    bins: tuple[int, ...] = ()  # the last one has no limit
    sum_s: float = 0.0

    def plus(self, seconds: float) -> Histogram:
        """One more of this duration."""
        at = next((i for i, limit in enumerate(self.limits_s) if seconds <= limit), len(self.bins) - 1)
        bins = (*self.bins[:at], self.bins[at] + 1, *self.bins[at + 1 :])
        return Histogram(bins, self.sum_s + seconds)

    @property
    def limits_s(self) -> tuple[float, ...]:
        """Of all bins but the last one."""
        return tuple(SHORTEST_S * 2**i for i in range(len(self.bins) - 1))


@dataclass(frozen=True, slots=True)
class Totals:
    """What has happened since the rank opened its page."""

    open_s: float = 0.0  # ago
    first_step_s: float | None = None  # ago: the end of its first step
    formed_s: float | None = None  # ago: the end of its first collective, which forms the first group
    checkpoints: int = 0
    checkpoint_step: int = 0  # finished steps when the last checkpoint began
    numbers_steps: bool = False  # the script sets the number of its steps
    uncaught: bool = False  # it exits after an exception that nothing has caught
    repeats: bool = False  # its steps so far are the lost ones of earlier ranks
    repeated: tuple[tuple[RankPhase, float], ...] = ()  # the time in each phase until that was over
    steps: Histogram = Histogram()  # all but the first
    calls: Histogram = Histogram()  # collectives
    hidden_s: float = 0.0  # an asynchronous collective ran, and the rank did not wait for it
    total_steps: int = 0  # that the script will take; 0: unknown


@dataclass(frozen=True, slots=True)
class RankView:
    rank: int
    pid: int = 0
    known: bool = False
    phase: RankPhase = RankPhase.STARTING
    phase_s: float = 0.0  # time in this phase
    quiet_s: float = 0.0  # since it last wrote its page
    step: int = 0  # number of finished steps
    step_s: float = 0.0  # since the last step finished, or since the rank began
    last_step_s: float = 0.0
    mean_step_s: float = 0.0  # of about the last dozen; 0.0 before the end of the second step
    phase_times: tuple[
        tuple[RankPhase, float], ...
    ] = ()  # total, including the time so far of the current phase
    buckets: Buckets | None = None
    collectives: tuple[Collective, ...] = ()  # the last 16, oldest first
    groups: tuple[GroupView, ...] = ()
    group_timeout_s: float = 0.0  # the longest timeout of any of its groups; 0.0: unknown
    section: Section | None = None
    message: str = ""
    error: str = ""
    process: ProcessView = ProcessView()
    totals: Totals = Totals()

    @property
    def waiting_in(self) -> tuple[Collective, ...]:
        """The collectives that the rank has entered and not finished, oldest first."""
        return tuple(each for each in self.collectives if each.finished_s is None)


# --- the report of a stalled rank ------------------------------------------------------------------
#
# An agent's report about one rank, for the diagnosis of a stall. It contains only what the diagnosis needs.
#
# `stalled_s` is the time for which the agent has seen no progress. `limit_s` is how long this may last in the
# current activity, if the user has set limits. If not, `stalled_s` is the time without any sign of life, and the
# evidence of all ranks decides (rendezvous/diagnosing/diagnosis.py). Times are given as ages: seconds before the
# report.

MAX_CALLS = 8  # of one rank
MAX_GROUPS = 8
ASK_EARLY_S = 10.0  # ranks that wait for so long may be in different collectives


@dataclass(frozen=True, slots=True)
class RankReport:
    rank: int
    known: bool = True  # it has written its page at least once
    stalled_s: float = 0.0
    limit_s: float | None = None  # None: no limit
    phase: RankPhase = RankPhase.STARTING
    phase_s: float = 0.0
    step: int = 0
    section: Words = ""
    message: Words = ""
    calls: tuple[Collective, ...] = ()  # oldest first
    groups: tuple[GroupView, ...] = ()
    alive: bool = True
    process: str = "?"  # R running, S sleeping, D uninterruptible, T stopped, t traced, F frozen, Z ended; ?
    busy: bool = False  # it uses processor time
    wchan: str = ""
    recorded: tuple[
        Collective, ...
    ] = ()  # as torch's flight recorder numbers them, including calls that C++ starts
    recorder: tuple[GroupView, ...] = ()  # empty: the recorder was not read
    # If the user has set no limit: the time without a sign of life other than CPU time of its main thread, which a rank
    # may also use while it waits, and how long this may last.
    idle_s: float | None = None
    idle_limit_s: float | None = None

    @property
    def is_overdue(self) -> bool:
        return self.limit_s is not None and self.stalled_s >= self.limit_s

    @property
    def is_stopped(self) -> bool:
        return self.alive and self.process in HELD

    @property
    def waits_in(self) -> tuple[Collective, ...]:
        """The collectives that the rank has entered and not finished, oldest first."""
        return tuple(call for call in self.calls if call.finished_s is None)

    @property
    def waits_s(self) -> float:
        """Since when it has been in the collective that it entered last; 0.0 if it has finished that."""
        return self.waits_in[-1].entered_s if self.waits_in else 0.0
