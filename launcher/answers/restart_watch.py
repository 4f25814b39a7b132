"""Measures the parts of each restart, and sends them to the service: at the first step, and when no step is repeated
any more. `ddpctl why` shows them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from launcher.answers import restart_clock
from launcher.answers.restart_clock import RestartClock
from launcher.exchange import RankEnded, StacksTaken, Swept
from rendezvous.values.events import Stop
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import CannotAnswer, TracePart

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent, AgentStep
    from launcher.health.communication import CommunicationWatch
    from launcher.health.pages import Pages
    from launcher.ranks.worker import Workers
    from rendezvous.values.questions import ProfileWanted, RestartTimes, Told, TraceWanted


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
                self._clock = restart_clock.failed(self._clock, now)
            case StacksTaken(_, cause):
                quiet = [view.quiet_s for view in self._pages.views() if view.rank == cause.rank]
                self._clock = restart_clock.failed(self._clock, now - max(quiet, default=0.0))
            case Stop():
                self.end()
                self._clock = restart_clock.stop_ordered(self._clock, now, self._pages.views())
            case Swept():
                self._clock = restart_clock.stopped(self._clock, now)
            case _:
                pass

    def ranks_started(self, generation: int) -> None:
        """The ranks of a generation start now. Called before the pages of new processes replace those of ended ones."""
        now = self._loop.time()
        self._clock = restart_clock.started(self._clock, now, generation, self._pages.views())
        self._told_steps = False
        if self._clock.is_restart:
            self._look_later()

    def forked(self) -> None:
        self._clock = restart_clock.forked(self._clock, self._loop.time())

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
        self._clock = restart_clock.looked(self._clock, self._loop.time(), self._pages.views())
        if self._clock.stepped_at is not None and (not self._told_steps or self._clock.is_complete):
            if not self._told_steps:
                self._stepped(self._clock)
            self._told_steps = True
            self._tell(restart_clock.times(self._clock))
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
