"""Measures the parts of each restart, and sends them to the service: at the first step, and when no step is repeated
any more. `ddpctl why` shows them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from launcher.exchange import AgentEvent, AgentStep, RankEnded, StacksTaken, Swept
from launcher.health.exposition import PARTS
from rendezvous.values.events import Stop
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import (
    CannotAnswer,
    ProfileWanted,
    RestartTimes,
    Told,
    TracePart,
    TraceWanted,
)
from rendezvous.values.rank_view import RankPhase, RankView

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.health.communication import CommunicationWatch
    from launcher.health.pages import Pages
    from launcher.ranks.worker import Workers


# How long the parts of a restart took on this node: detect, stop, meet, fork, init, first step, redo.
#
# Theory of operation
# -------------------
# Each part ends at a moment that the agent sees: the order to stop, the end of the last process, the start of the next
# ranks, their first process. From then on the status pages tell: a page adds up the time of all phases, so the moment
# at which a rank left the phase `starting` is known exactly, however late the page is read. So is the end of the first
# step, as long as it is one of the last steps.
#
# `redo` ends when the slowest rank has as many steps as the ranks had before, by the numbers on the pages: a script
# that does not resume repeats all of them.


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


_SOONEST_S, _LATEST_S = 0.02, 1.0
_SHARE = 0.05  # of the time so far: the next look


class RestartWatch:
    def __init__(
        self,
        pages: Pages,
        tell: Callable[[RestartTimes], None],
        stepped: Callable[[RestartClock], None],
        boundary: ErrorBoundary,
    ) -> None:
        """`stepped` is called once per restart, at the first step."""
        self._pages, self._tell, self._stepped, self._boundary = pages, tell, stepped, boundary
        self._loop = asyncio.get_running_loop()
        self._clock = RestartClock()
        self._told_steps = False
        self._timer: asyncio.TimerHandle | None = None

    def observe(self, step: AgentStep) -> None:
        self._boundary.called("measuring a restart", lambda: self._take(step.event), None)

    def _take(self, event: AgentEvent) -> None:
        now = self._loop.time()
        match event:
            case RankEnded(_, _, cause) if cause is not None:
                self._clock = failed(self._clock, now)
            case StacksTaken(_, cause):
                quiet = [view.quiet_s for view in self._pages.views() if view.rank == cause.rank]
                self._clock = failed(self._clock, now - max(quiet, default=0.0))
            case Stop():
                self.end()
                self._clock = stop_ordered(self._clock, now, self._pages.views())
            case Swept():
                self._clock = stopped(self._clock, now)
            case _:
                pass

    def ranks_started(self, generation: int) -> None:
        """The ranks of a generation start now. Called before the pages of new processes replace those of ended ones."""
        now = self._loop.time()
        self._clock = started(self._clock, now, generation, self._pages.views())
        self._told_steps = False
        if self._clock.is_restart:
            self._look_later()

    def forked(self) -> None:
        self._clock = forked(self._clock, self._loop.time())

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        passed_s = self._loop.time() - (self._clock.started_at or 0.0)
        pause_s = min(_LATEST_S, max(_SOONEST_S, _SHARE * passed_s))
        self._timer = self._loop.call_later(
            pause_s, self._boundary.called, "measuring a restart", self._look, None
        )

    def _look(self) -> None:
        self._clock = looked(self._clock, self._loop.time(), self._pages.views())
        if self._clock.stepped_at is not None and (not self._told_steps or self._clock.is_complete):
            if not self._told_steps:
                self._stepped(self._clock)
            self._told_steps = True
            self._tell(times(self._clock))
        if not self._clock.is_complete:
            self._look_later()


# --- traces of ranks by torch's profiler: requests them, and hands them out in parts ----------------

_PART_BYTES = 512 * 1024
_FIRST_STEP_S = 60.0  # until the rank has finished the step that it is in, and written the file
_MOST_S = 300.0


@dataclass(frozen=True, slots=True)
class _Trace:
    path: str
    steps: int


class Traces:
    def __init__(self, ranks: Workers, communication: CommunicationWatch) -> None:
        self._ranks, self._communication = ranks, communication
        self._known: dict[tuple[int, str], _Trace] = {}  # by rank and name

    async def record(self, wanted: ProfileWanted, generation: int) -> Told:
        folder = self._ranks.folders().get(wanted.rank)
        if folder is None:
            return CannotAnswer(f"rank {wanted.rank} does not run on this node now")
        if not 0 < wanted.seconds <= _MOST_S:
            return CannotAnswer(f"a profile takes at most {_MOST_S:g} s")
        name = f"trace-{len(self._known) + 1}.json.gz"
        path = os.path.join(folder, name)
        within_s = wanted.seconds + _FIRST_STEP_S
        done = await self._communication.profile(generation, wanted.rank, wanted.seconds, path, within_s)
        if done is None:
            return CannotAnswer(
                f"rank {wanted.rank} has no process group yet, so it cannot be asked; it has one after "
                "init_process_group"
            )
        problem, steps = done
        if problem:
            return CannotAnswer(f"rank {wanted.rank} was not profiled: {problem}")
        self._known[wanted.rank, name] = _Trace(path, steps)
        return await asyncio.to_thread(self._part, wanted.rank, name, 0)

    async def part(self, wanted: TraceWanted) -> Told:
        return await asyncio.to_thread(self._part, wanted.rank, wanted.name, wanted.offset)

    def _part(self, rank: int, name: str, offset: int) -> Told:
        trace = self._known.get((rank, name))
        if trace is None:
            return CannotAnswer(f"this agent has no trace {name} of rank {rank}")
        try:
            with open(trace.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), _PART_BYTES, max(0, offset))
        except OSError as error:
            return CannotAnswer(f"cannot read {trace.path}: {error.strerror}")
        return TracePart(name, size, offset, data, trace.steps)
