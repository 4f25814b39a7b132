"""Keeps the time of this node's ranks while the agent runs, and reports it to the service.

launcher/health/time_ledger.py divides the time. This module tells it what happens, with the time and the status pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from launcher.exchange import AgentPhase, AgentStep, Isolated, RankEnded, Supervision
from launcher.health.time_ledger import LedgerStage, TimeLedger
from launcher.health.watcher import RankWatcher
from rendezvous.diagnosing import goodput
from rendezvous.values.events import (
    AgentLeft,
    AgentStopped,
    FromAgent,
    RanksFinished,
    RankTimesReported,
    Stop,
)
from rendezvous.values.rank_time import JobTime, RankTime, TimeState, in_words

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.health.pages import Pages
    from rendezvous.values.rank_view import RankView
    from rendezvous.values.types import Outcome

_EVERY_S = 5.0
_AFTER_THE_END_S = 1.0  # ranks of other nodes still run; nothing has to be read for this
_SHORTEST_S = 30.0  # of a job with a line about its time: a shorter one is mostly its start
_HERE = "here"  # the only node that is known here
_LAST_REPORT_BEFORE = (AgentStopped, RanksFinished, AgentLeft)


class TimeWatch(RankWatcher):
    what = "reporting the time of the ranks"

    def __init__(
        self,
        nproc: int,
        began: float,
        pages: Pages,
        send: Callable[[FromAgent], None],
        boundary: ErrorBoundary,
    ) -> None:
        """`began`: when the agent started, on the monotonic clock."""
        super().__init__(boundary)
        self._pages, self._send = pages, send
        self._ledgers = [TimeLedger(began)] * nproc
        self._divided = TimeState()
        self._state: Supervision | None = None
        self._imports: set[str] = set()

    # --- what happens --------------------------------------------------------------------------------

    def observe(self, step: AgentStep) -> None:
        event, before, after, _actions = step
        self._state = after
        if before.phase is after.phase:
            if after.phase is AgentPhase.RUNNING and isinstance(event, RankEnded):
                self._ended(event, before)
            return
        match after.phase:
            case AgentPhase.STOPPING:
                caused = isinstance(event, Isolated) or (
                    isinstance(event, Stop) and event.decision.cause is not None
                )
                self._stopping(is_failure=caused)
            case AgentPhase.JOINING:
                self._move(LedgerStage.JOINING)
            case AgentPhase.RUNNING:
                self._move(LedgerStage.FORKING)

    def _ended(self, event: RankEnded, before: Supervision) -> None:
        if event.local_rank in before.live:
            self._move(LedgerStage.FINISHED if event.cause is None else LedgerStage.FAILED, event.local_rank)

    def begin(self, generation: int) -> None:
        """Ranks that were only paused have continued."""
        now = time.monotonic()
        for local_rank, ledger in enumerate(self._ledgers):
            view = self._pages.view(local_rank)
            if view is not None and view.pid and view.process.alive:
                self._ledgers[local_rank] = ledger.resumed(now, view)
        super().begin(generation)

    def note_started(self, local_rank: int) -> None:
        if self._ledgers[local_rank].stage is LedgerStage.FORKING:  # no order to stop has come before
            self._move(LedgerStage.RUNNING, local_rank)

    def _move(self, stage: LedgerStage, only: int | None = None) -> None:
        now = time.monotonic()
        for local_rank, ledger in enumerate(self._ledgers):
            if only is None or local_rank == only:
                self._ledgers[local_rank] = ledger.moved(stage, now, self._view(local_rank, ledger))

    def _stopping(self, *, is_failure: bool) -> None:
        now = time.monotonic()
        for local_rank, ledger in enumerate(self._ledgers):
            view = self._view(local_rank, ledger)
            if is_failure:
                self._ledgers[local_rank] = ledger.failed(now, view)
            else:
                self._ledgers[local_rank] = ledger.moved(LedgerStage.STOPPING, now, view)

    def _view(self, local_rank: int, ledger: TimeLedger) -> RankView | None:
        if ledger.stage is not LedgerStage.RUNNING:
            return None
        return self._boundary.called("reading a status page", lambda: self._pages.view(local_rank), None)

    def learned(self, names: Iterable[str]) -> None:
        """All ranks have begun to import these modules."""
        self._imports.update(names)
        self.look()

    # --- reports -------------------------------------------------------------------------------------

    def before_sending(self, message: FromAgent) -> None:
        """Send the time first: the service may sum up the job with this message."""
        if isinstance(message, _LAST_REPORT_BEFORE):
            self.look()

    def pause_s(self) -> float:
        are_over = all(ledger.stage is LedgerStage.FINISHED for ledger in self._ledgers)
        return _AFTER_THE_END_S if are_over else _EVERY_S

    def look(self) -> None:
        state, ranks = self._state, self._take()
        if state is None or state.assignment is None or not state.assignment.wants_times:
            return  # a service of the release before rejects a message that it does not know
        if ranks and state.phase is not AgentPhase.DONE:
            self._send(RankTimesReported(state.agent, ranks, tuple(sorted(self._imports))))

    def _take(self) -> tuple[RankTime, ...]:
        """The time until now. Of the ranks of this node, it is also divided as the service divides that of all."""
        ranks = self._boundary.called("adding up the time of the ranks", self.rank_times, ())
        if ranks:
            self._divided = goodput.reported(self._divided, _HERE, "", ranks)
        return ranks

    def divided(self) -> tuple[RankTime, ...]:
        """The time of the ranks until now, with `waiting` compared to the other ranks of this node."""
        self._take()
        return goodput.ranks_of(self._divided, [_HERE])

    def rank_times(self) -> tuple[RankTime, ...]:
        """Until now. Empty before the node has a place in the job."""
        if self._state is None or self._state.assignment is None:
            return ()
        first = self._state.assignment.rank_offset
        return tuple(self._rank_time(local_rank, first) for local_rank in range(len(self._ledgers)))

    def _rank_time(self, local_rank: int, first: int) -> RankTime:
        view = self._pages.view(local_rank)
        ledger = self._ledgers[local_rank] = self._ledgers[local_rank].looked(view)
        spent, hidden = ledger.so_far(time.monotonic(), view), ledger.hidden_so_far(view)
        if view is None or not view.known:
            return RankTime(first + local_rank, spent, hidden=hidden)
        totals = view.totals
        saved = totals.checkpoint_step if totals.checkpoints else 0
        counts = (view.step, saved, totals.numbers_steps)
        return RankTime(first + local_rank, spent, *counts, has_page=True, hidden=hidden)

    def summary(self, outcome: Outcome | None) -> str:
        """The time of the job as text, on its first node; of this node if it was stopped alone. "" if unknown."""
        job = outcome.time if outcome is not None else self._node_time()
        mine = self._state.assignment if self._state is not None else None
        if job is None or mine is None or (outcome is not None and mine.node_rank != 0):
            return ""
        is_worth_a_line = job.spent.training > 0 and job.spent.total >= _SHORTEST_S * job.ranks
        return in_words(job) if is_worth_a_line else ""

    def _node_time(self) -> JobTime | None:
        """None if no rank of this node has shown what it does."""
        self._take()
        return goodput.whole(self._divided)
