"""How long the parts of a restart took on this node: detect, stop, meet, fork, init, first step, redo.

Theory of operation
-------------------
Each part ends at a moment that the agent sees: the order to stop, the end of the last process, the start of the next
ranks, their first process. From then on the status pages tell: a page adds up the time of all phases, so the moment at
which a rank left the phase `starting` is known exactly, however late the page is read. So is the end of the first step,
as long as it is one of the last steps.

`redo` ends when the slowest rank has as many steps as the ranks had before, by the numbers on the pages: a script that
does not resume repeats all of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from launcher.health.exposition import PARTS
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import RestartTimes
from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rendezvous.values.rank_view import RankView


@dataclass(frozen=True, slots=True)
class RestartClock:
    """The moments of the restart that is going on, or of the last one; None: not reached."""

    failed_at: float | None = None  # the last progress of a rank of this node that failed
    ordered_at: float | None = None
    stopped_at: float | None = None
    started_at: float | None = None
    forked_at: float | None = None
    begun_at: float | None = None  # the last rank began its first step
    stepped_at: float | None = None
    redone_at: float | None = None
    generation: int = -1
    reached: int = 0  # steps before
    before: tuple[tuple[int, int], ...] = ()  # steps of ranks that kept their process, by pid

    @property
    def is_restart(self) -> bool:
        return self.ordered_at is not None

    @property
    def is_complete(self) -> bool:
        return self.started_at is None or self.redone_at is not None


def moments(clock: RestartClock) -> tuple[float | None, ...]:
    """The ends of the parts up to the first step, with the beginning of the first part."""
    return (
        *(clock.failed_at, clock.ordered_at, clock.stopped_at, clock.started_at),
        *(clock.forked_at, clock.begun_at, clock.stepped_at),
    )


def parts_s(clock: RestartClock) -> dict[str, float]:
    """The durations of the parts up to the first step that are known."""
    pairs = zip(PARTS, pairwise(moments(clock)), strict=True)
    return {
        name: max(0.0, end - begin) for name, (begin, end) in pairs if begin is not None and end is not None
    }


def failed(clock: RestartClock, at: float) -> RestartClock:
    """A rank of this node failed, or is accused of a hang. The first one counts; later ones end because of the stop."""
    if clock.ordered_at is None:
        return clock if clock.failed_at is not None else replace(clock, failed_at=at)
    return RestartClock(failed_at=at) if clock.started_at is not None else clock


def stop_ordered(clock: RestartClock, now: float, views: Sequence[RankView]) -> RestartClock:
    if clock.ordered_at is not None and clock.started_at is None:
        return clock  # repeated while ranks are stopped
    failed_at = clock.failed_at if clock.ordered_at is None else None
    return RestartClock(failed_at, ordered_at=now, reached=max((view.step for view in views), default=0))


def stopped(clock: RestartClock, now: float) -> RestartClock:
    return replace(clock, stopped_at=now) if clock.stopped_at is None and clock.is_restart else clock


def started(clock: RestartClock, now: float, generation: int, views: Sequence[RankView]) -> RestartClock:
    """`views`: of the ranks that keep their processes."""
    if not clock.is_restart:
        return RestartClock(generation=generation)
    kept = tuple((view.pid, view.step) for view in views if view.process.alive and view.pid)
    return replace(clock, started_at=now, generation=generation, before=kept)


def forked(clock: RestartClock, now: float) -> RestartClock:
    """The process of one more rank runs."""
    return replace(clock, forked_at=now) if clock.started_at is not None else clock


def looked(clock: RestartClock, now: float, views: Sequence[RankView]) -> RestartClock:
    """After a look at the pages of all ranks of the node."""
    if clock.started_at is None or not views or not all(view.known for view in views):
        return clock
    kept = dict(clock.before)
    if clock.begun_at is None and all(view.phase is not RankPhase.STARTING for view in views):
        new = [view for view in views if view.pid not in kept]
        forked_at = clock.forked_at or clock.started_at  # if all ranks have kept their processes
        begun_at = max([forked_at, *(_begun_at(view, now) for view in new)])
        clock = replace(clock, forked_at=forked_at, begun_at=begun_at)
    if (
        clock.stepped_at is None
        and clock.begun_at is not None
        and all(_steps(view, kept) > 0 for view in views)
    ):
        at = max(_first_step_at(view, now, kept) for view in views)
        clock = replace(clock, stepped_at=max(clock.begun_at, at))
    if (
        clock.redone_at is None
        and clock.stepped_at is not None
        and min(view.step for view in views) >= clock.reached
    ):
        late = max(view.step_s + (view.step - max(clock.reached, 1)) * view.mean_step_s for view in views)
        clock = replace(clock, redone_at=max(clock.stepped_at, now - late))
    return clock


def _begun_at(view: RankView, now: float) -> float:
    return now - sum(seconds for phase, seconds in view.phase_times if phase is not RankPhase.STARTING)


def _steps(view: RankView, kept: Mapping[int, int]) -> int:
    """Finished steps in this generation. A script that numbers its steps begins with a high number."""
    return max(0, view.step - kept.get(view.pid, 0)) if view.last_step_s > 0 else 0


def _first_step_at(view: RankView, now: float, kept: Mapping[int, int]) -> float:
    """Known if few steps were finished since; a number that the script has set is not a count."""
    done = _steps(view, kept)
    later = (done - 1) * view.mean_step_s if view.mean_step_s > 0 and done < _COUNTED else 0.0
    return now - view.step_s - later


_COUNTED = 1000


def times(clock: RestartClock) -> RestartTimes:
    ends = (*moments(clock), clock.redone_at)
    parts = (None if begin is None or end is None else max(0.0, end - begin) for begin, end in pairwise(ends))
    detect_s, stop_s, meet_s, fork_s, init_s, first_step_s, redo_s = parts
    return RestartTimes(clock.generation, detect_s, stop_s, meet_s, fork_s, init_s, first_step_s, redo_s)
