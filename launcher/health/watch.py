"""Reads the ranks' pages periodically, and reports when a rank has stalled.

launcher/health/stall_detection.py defines a stall.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from launcher.health import stall_detection
from launcher.health.stall_detection import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.error_boundary import ErrorBoundary
    from launcher.settings.budgets import Budgets
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.rank_view import RankView

_AGAIN_S = 5.0  # a service that has just started does not have earlier reports


class HangWatch:
    def __init__(
        self,
        budgets: Budgets,
        views: Callable[[], tuple[RankView, ...]],
        report: Callable[[int], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._budgets, self._views, self._report, self._boundary = budgets, views, report, boundary
        self._loop = asyncio.get_running_loop()
        self._watch = Watch(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._generation = -1
        self._reported_at = float("-inf")

    def begin(self, generation: int) -> None:
        """Start to watch: the ranks of this generation run."""
        self.end()
        self._generation = generation
        self._watch = Watch(self._loop.time())
        self._reported_at = float("-inf")
        if self._budgets.enabled:
            self._later()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def contact(self, held: bool) -> None:
        """Report a stall again: the service did not receive the reports while it was unreachable."""
        if held:
            self._reported_at = float("-inf")

    def reports(self) -> tuple[RankReport, ...]:
        """The state of the ranks now."""
        views, now = self._views(), self._loop.time()
        self._watch = stall_detection.look(self._watch, views, now, self._budgets.period_s)
        return stall_detection.reports(self._watch, views, self._budgets)

    def _later(self) -> None:
        self._timer = self._loop.call_later(self._budgets.period_s, self._look)

    def _look(self) -> None:
        self._later()
        ranks = self._boundary.called("reading the state of the ranks", self.reports, ())
        if stall_detection.is_overdue(ranks) and self._loop.time() - self._reported_at >= _AGAIN_S:
            self._reported_at = self._loop.time()
            self._report(self._generation)
