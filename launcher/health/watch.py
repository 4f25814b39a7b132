"""Reads the ranks' pages periodically, and reports when a rank may hang.

launcher/health/stall_detection.py defines that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from launcher.health import stall_detection
from launcher.health.process_signs import daemons_of, signs_of, tcp_bytes
from launcher.health.signs import WINDOW_S
from launcher.health.stall_detection import Watch
from launcher.settings.spec import ASLEEP_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from launcher.error_boundary import ErrorBoundary
    from launcher.health.signs import Signs
    from launcher.settings.spec import Budgets
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.rank_view import RankView

_AGAIN_S = 5.0  # a service that has just started does not have earlier reports
_AGAIN_IF_IDLE_S = ASLEEP_S / 20  # so late may a verdict be
_LOOKS_PER_LIMIT = 4


class HangWatch:
    """`processes`: by rank. `output`: a number that changes with each output of a rank. `say`: tells the user.

    `store_port`: libraries poll the store of the ranks, also when nothing happens.
    """

    def __init__(
        self,
        budgets: Budgets,
        views: Callable[[], tuple[RankView, ...]],
        processes: Callable[[], Mapping[int, int]],
        output: Callable[[], int],
        store_port: Callable[[], int],
        report: Callable[[int], None],
        say: Callable[[str], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._budgets, self._views, self._processes, self._output = budgets, views, processes, output
        self._store_port, self._report, self._say, self._boundary = store_port, report, say, boundary
        self._loop = asyncio.get_running_loop()
        self._watch = Watch(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._generation = -1
        self._reported_at = float("-inf")
        self._early: frozenset[tuple[int, int, int]] = frozenset()
        self._has_warned = False

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
            self._early = frozenset()

    def reports(self) -> tuple[RankReport, ...]:
        """The state of the ranks now."""
        views, now = self._views(), self._loop.time()
        looks = self._looks(views, now) if self._budgets.by_evidence else {}
        self._watch = stall_detection.look(self._watch, views, now, self._budgets.period_s, looks)
        return stall_detection.reports(self._watch, views, self._budgets)

    def _looks(self, views: tuple[RankView, ...], now: float) -> dict[int, Signs]:
        window_s = min(WINDOW_S, ASLEEP_S / _LOOKS_PER_LIMIT)
        chosen = stall_detection.to_look_at(self._watch, views, now, window_s)
        if not chosen:
            return {}
        processes, output, connections = self._processes(), self._output(), tcp_bytes(self._store_port())
        daemons = daemons_of(processes.values())
        return {
            view.rank: signs_of(processes[view.rank], view.pid, output, connections, daemons)
            for view in chosen
            if view.rank in processes
        }

    def _later(self) -> None:
        self._timer = self._loop.call_later(self._budgets.period_s, self._look)

    def _look(self) -> None:
        self._later()
        ranks = self._boundary.called("reading the state of the ranks", self.reports, ())
        is_overdue = stall_detection.is_overdue(ranks)
        again_s = _AGAIN_S if is_overdue else _AGAIN_IF_IDLE_S
        is_due = self._loop.time() - self._reported_at >= again_s
        before, self._early = self._early, stall_detection.early_questions(ranks)
        if self._early - before or (is_due and (is_overdue or stall_detection.is_idle(ranks))):
            self._reported_at = self._loop.time()
            self._report(self._generation)
        if not self._has_warned and (waiting := stall_detection.waits_for_long(ranks)) is not None:
            self._has_warned = True
            self._warn(waiting)

    def _warn(self, waiting: RankReport) -> None:
        call, minutes = waiting.waits_in[-1], waiting.waits_s / 60
        self._say(
            f"ddp-launch: rank {waiting.rank} has waited for {minutes:.0f} min in {call.op} #{call.seq}. There is no "
            "evidence of a hang, so the job goes on. To end a job that waits for so long, use --hang-timeout 10min "
            "(ddp-launch docs hangs)"
        )
