"""What each second of a rank's place on this node was spent on. Pure; docs/goodput.md defines the classes.

Theory of operation
-------------------
A place is a local rank, from the start of the agent to its end: through all processes that take it one after the other,
and through the time between them. It is always in one stage. A change of the stage closes the time since the change
before, so no time is left out or counted twice. In all stages but one, this time has a single class. While the process
runs, its status page divides it: the page counts to the nanosecond, and what it does not cover (the time until the
process opens it) belongs to the start. So the classes add up to the time since the agent
started, whatever the page says.

When ranks are stopped after a failure, the phase in which they were is not progress any more: they waited for the rank
that failed, or hung. Its time counts as `detect`. Other stops take nothing back.

A part of a step that lasts for much longer than a step is no progress either (`_stalled_s`): the rest is `waiting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from math import inf

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import CLASSES, TimeSpent
from rendezvous.values.rank_view import RankPhase, RankView


class LedgerStage(StrEnum):
    JOINING = "joining"  # no process; the world is being formed
    FORKING = "forking"
    RUNNING = "running"
    FAILED = "failed"  # its process has ended with an error; no order to stop has arrived
    FINISHED = "finished"  # its process has ended well
    STOPPING = "stopping"


_CLASS_OF_PHASE = {
    RankPhase.STARTING: "start",
    RankPhase.DATA: "data",
    RankPhase.FORWARD: "forward",
    RankPhase.BACKWARD: "backward",
    RankPhase.COMMUNICATE: "communication",
    RankPhase.OPTIMIZER: "optimizer",
    RankPhase.CHECKPOINT: "checkpoint",
    RankPhase.EVALUATION: "evaluation",
    RankPhase.SECTION: "idle",
    RankPhase.IDLE: "idle",
    RankPhase.EXITING: "idle",
}
_REPEATABLE = (*tuple(RankPhase)[1:6], RankPhase.IDLE)


Stalls = tuple[tuple[RankPhase, float], ...]  # the phase, and seconds in it without progress


@dataclass(frozen=True, slots=True)
class TimeLedger:
    since: float  # the beginning of the stage
    stage: LedgerStage = LedgerStage.JOINING
    closed: TimeSpent = TimeSpent()  # before that
    has_run: bool = False  # a process has run here before this stage, so time until a step is lost
    # What the page of a process showed when it continued after a pause: the time of an earlier stage.
    base: tuple[tuple[RankPhase, float], ...] = ()
    stalls: Stalls = ()  # of this stage; the last one may go on
    hidden: float = 0.0  # communication behind computation: of the processes before
    hidden_base: float = 0.0

    def so_far(self, now: float, view: RankView | None) -> TimeSpent:
        """The time until now."""
        return self.closed + self._open(now, view)

    def hidden_so_far(self, view: RankView | None) -> float:
        """Seconds in which collectives ran behind computation."""
        if self.stage is not LedgerStage.RUNNING or view is None:
            return self.hidden
        return self.hidden + max(0.0, view.totals.hidden_s - self.hidden_base)

    def looked(self, view: RankView | None) -> TimeLedger:
        """Note how long the rank has made no progress."""
        if self.stage is not LedgerStage.RUNNING or view is None or not _stalled_s(view):
            return self
        return replace(self, stalls=(*self._past_stalls(view), (view.phase, _stalled_s(view))))

    def _past_stalls(self, view: RankView) -> Stalls:
        """Without the last one, if it goes on in this view."""
        phase, seconds = self.stalls[-1] if self.stalls else (None, 0.0)
        return self.stalls[:-1] if phase is view.phase and seconds <= _stalled_s(view) else self.stalls

    def moved(self, stage: LedgerStage, now: float, view: RankView | None) -> TimeLedger:
        """Enter the next stage. The view is of the same moment, and matters only if a process runs."""
        if stage is self.stage:
            return self
        has_run = self.has_run or self.stage is LedgerStage.RUNNING
        return TimeLedger(now, stage, self.so_far(now, view), has_run, hidden=self.hidden_so_far(view))

    def resumed(self, now: float, view: RankView) -> TimeLedger:
        """A process that was paused continues."""
        begun = self.moved(LedgerStage.RUNNING, now, view)
        return replace(begun, base=view.phase_times, hidden_base=view.totals.hidden_s)

    def failed(self, now: float, view: RankView | None) -> TimeLedger:
        """Ranks are stopped because of a failure."""
        if self.stage is not LedgerStage.RUNNING or view is None or not view.known:
            return self.moved(LedgerStage.STOPPING, now, view)
        over = replace(self, stalls=self._past_stalls(view))
        before = over.moved(LedgerStage.STOPPING, now, replace(view, mean_step_s=inf))
        return replace(before, closed=_without_progress(before.closed, self.closed, view))

    def _open(self, now: float, view: RankView | None) -> TimeSpent:
        wall = max(0.0, now - self.since)
        match self.stage:
            case LedgerStage.JOINING:
                return TimeSpent().plus("meet" if self.has_run else "start", wall)
            case LedgerStage.FORKING:
                return TimeSpent().plus("fork" if self.has_run else "start", wall)
            case LedgerStage.FAILED:
                return TimeSpent().plus("detect", wall)
            case LedgerStage.FINISHED:
                return TimeSpent().plus("waiting", wall)
            case LedgerStage.STOPPING:
                return TimeSpent().plus("stop", wall)
            case LedgerStage.RUNNING:
                stalls = self.looked(view).stalls
                return of_page(view, wall, "init" if self.has_run else "start", dict(self.base), stalls)


def of_page(
    view: RankView | None, wall: float, start: str, base: Mapping[RankPhase, float], stalls: Stalls
) -> TimeSpent:
    """Divide the time for which a process has run. `start`: the class of the time until its first step."""
    if view is None or not view.known:
        return TimeSpent().plus("idle", wall)
    spent = dict.fromkeys(CLASSES, 0.0)
    repeated = dict(view.totals.repeated)
    for phase, in_all in view.phase_times:
        seconds = max(0.0, in_all - base.get(phase, 0.0))
        again_in_all = max(0.0, repeated.get(phase, 0.0) - base.get(phase, 0.0))
        again = seconds if view.totals.repeats else min(seconds, again_in_all)
        if phase not in _REPEATABLE:
            again = 0.0
        stalled = min(seconds - again, sum(each_s for each, each_s in stalls if each is phase))
        name = _CLASS_OF_PHASE[phase]
        spent[start if name == "start" else name] += seconds - again - stalled
        spent["waiting"] += stalled
        spent["redo"] += again
    spent[start] += wall - sum(spent.values())
    return _without_negative(spent, start)


_IN_STEPS = (RankPhase.FORWARD, RankPhase.BACKWARD, RankPhase.COMMUNICATE, RankPhase.OPTIMIZER)
_STARTS, _STALL_S, _STALL_STEPS = RankPhase.STARTING, 10.0, 5.0


def _stalled_s(view: RankView) -> float:
    """How long the current part of a step lasts beyond ten seconds and the time of five steps."""
    if view.phase not in _IN_STEPS or not view.step:
        return 0.0
    first_s = (
        view.totals.open_s - (view.totals.first_step_s or 0.0) - dict(view.phase_times).get(_STARTS, 0.0)
    )
    return max(0.0, view.phase_s - max(_STALL_S, _STALL_STEPS * (view.mean_step_s or first_s)))


def _without_negative(spent: dict[str, float], start: str) -> TimeSpent:
    """A page that covers more than the time of its process: clocks were read one after the other, or it is corrupt."""
    if spent[start] < 0.0:
        excess, spent[start] = -spent[start], 0.0
        whole = sum(spent.values())
        keep = max(0.0, whole - excess) / whole if whole > 0.0 else 0.0
        spent = {name: seconds * keep for name, seconds in spent.items()}
    return TimeSpent(**spent)


def _without_progress(spent: TimeSpent, before: TimeSpent, view: RankView) -> TimeSpent:
    """Move the time of the phase in which the rank was stopped to `detect`, at most what this process has added."""
    name = _CLASS_OF_PHASE[view.phase]
    if view.phase is RankPhase.STARTING:
        return spent
    if view.totals.repeats and view.phase in _REPEATABLE:
        name = "redo"
    moved = min(view.phase_s, getattr(spent, name) - getattr(before, name))
    return spent.plus(name, -moved).plus("detect", moved) if moved > 0 else spent
