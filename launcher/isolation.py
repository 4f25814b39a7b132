"""Checks the progress of the ranks while the service is unreachable. launcher/progress.py defines progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from launcher import progress
from launcher.progress import Signs
from launcher.template import tree
from launcher.template.process_stat import process_stat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Listener(Protocol):
    def isolated(self, reason: str) -> None:
        """Called when the ranks must be stopped: no service and no progress for `--isolation-timeout`."""

    def waiting_alone(self, give_up_s: float) -> None:
        """Called once per loss of contact, if no rank runs."""

    def out_of_reach(self, reason: str) -> None:
        """Called when the service was unreachable for the whole `--join-timeout`, and no rank runs."""


class IsolationWatch:
    def __init__(
        self,
        timeout_s: float,
        give_up_s: float,
        pids: Callable[[], Iterable[int]],
        output_bytes: Callable[[], int],
        step: Callable[[], int | None],
        listener: Listener,
    ) -> None:
        self._timeout_s, self._give_up_s = timeout_s, give_up_s
        self._pids, self._output_bytes, self._step, self._listener = pids, output_bytes, step, listener
        self._waiting_reported = False
        self._loop = asyncio.get_running_loop()
        self._isolation: progress.Isolation | None = None
        self._timer: asyncio.TimerHandle | None = None

    def contact(self, held: bool) -> None:
        if held:
            self.close()
        elif self._isolation is None:
            self._isolation = progress.contact_lost(self._signs())
            self._waiting_reported = False
            self._check_later()

    def close(self) -> None:
        self._isolation = None
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(
            progress.pause_s(min(self._timeout_s, self._give_up_s)), self._check
        )

    def _check(self) -> None:
        assert self._isolation is not None
        self._isolation = progress.updated(self._isolation, self._signs())
        if progress.is_over(self._isolation, self._timeout_s):
            self._listener.isolated(progress.in_words(self._isolation))
            self._isolation = progress.contact_lost(self._isolation.seen)
        if self._isolation.idle_since is not None and not self._waiting_reported:
            self._waiting_reported = True
            self._listener.waiting_alone(self._give_up_s)
        if progress.is_hopeless(self._isolation, self._give_up_s):
            self._listener.out_of_reach(
                f"the rendezvous was unreachable for {self._give_up_s:g} s (--join-timeout), and no rank runs on "
                "this node. Run ddp-launch on this node again when the rendezvous is reachable"
            )
        else:
            self._check_later()

    def _signs(self) -> Signs:
        ranks = tuple(self._pids())
        pids = [pid for rank in ranks for pid in (rank, *tree.descendants(rank))]
        cpu_s = sum(stat.cpu_s for stat in map(process_stat, pids) if stat is not None)
        return Signs(self._loop.time(), cpu_s, self._output_bytes(), len(ranks), self._step())
