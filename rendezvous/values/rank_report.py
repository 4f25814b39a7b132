"""An agent's report about one rank, for the diagnosis of a stall. It contains only what the diagnosis needs.

`stalled_s` is the time for which the agent has seen no progress. `limit_s` is how long this may last in the current
activity, if the user has set limits. If not, `stalled_s` is the time without any sign of life, and the evidence of all
ranks decides (rendezvous/diagnosing/diagnosis.py). Times are given as ages: seconds before the report.
"""

from __future__ import annotations

from rendezvous.values.late_dataclass import dataclass

# At run time, not for the checker only: the codec reads these annotations.
from rendezvous.values.rank_view import HELD, Collective, GroupView, RankPhase
from rendezvous.values.text_limits import Words

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
