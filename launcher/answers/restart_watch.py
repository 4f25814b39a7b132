"""Measures the parts of each restart, and sends them to the service: at the first step, and when no step is repeated
any more. `ddpctl why` shows them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from launcher.answers import restart_clock
from launcher.answers.restart_clock import Clock
from launcher.exchange import RankEnded, StacksTaken, Swept
from rendezvous.values.events import Stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent
    from launcher.health.pages import Pages
    from rendezvous.values.questions import RestartTimes

_SOONEST_S, _LATEST_S = 0.02, 1.0
_SHARE = 0.05  # of the time so far: the next look


class RestartWatch:
    def __init__(
        self,
        pages: Pages,
        tell: Callable[[RestartTimes], None],
        stepped: Callable[[Clock], None],
        boundary: ErrorBoundary,
    ) -> None:
        """`stepped` is called once per restart, at the first step."""
        self._pages, self._tell, self._stepped, self._boundary = pages, tell, stepped, boundary
        self._loop = asyncio.get_running_loop()
        self._clock = Clock()
        self._told_steps = False
        self._timer: asyncio.TimerHandle | None = None

    def take(self, event: AgentEvent) -> None:
        """An event of the agent."""
        self._boundary.called("measuring a restart", lambda: self._take(event), None)

    def _take(self, event: AgentEvent) -> None:
        now = self._loop.time()
        match event:
            case RankEnded(_, _, cause) if cause is not None:
                self._clock = restart_clock.failed(self._clock, now)
            case StacksTaken(_, cause):
                quiet = [view.quiet_s for view in self._pages.views() if view.rank == cause.rank]
                self._clock = restart_clock.failed(self._clock, now - max(quiet, default=0.0))
            case Stop():
                self._look_no_more()
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
        self._look_no_more()

    def _look_no_more(self) -> None:
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
