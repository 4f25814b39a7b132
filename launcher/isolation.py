"""Looks at the ranks while the service is out of reach, and only then. See launcher/progress.py for what it means."""

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
        """The ranks are to be stopped."""

    def waiting_alone(self, give_up_s: float) -> None:
        """Contact is lost while no rank runs. Called once per loss of contact."""

    def out_of_reach(self, reason: str) -> None:
        """Contact stayed lost for the whole timeout."""


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
        self._told_of_waiting = False
        self._loop = asyncio.get_running_loop()
        self._isolation: progress.Isolation | None = None
        self._timer: asyncio.TimerHandle | None = None

    def contact(self, held: bool) -> None:
        if held:
            self.close()
        elif self._isolation is None:
            self._isolation = progress.cut_off(self._signs())
            self._told_of_waiting = False
            self._look_later()

    def close(self) -> None:
        self._isolation = None
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(
            progress.next_look_s(min(self._timeout_s, self._give_up_s)), self._look
        )

    def _look(self) -> None:
        assert self._isolation is not None
        self._isolation = progress.look(self._isolation, self._signs())
        if progress.is_over(self._isolation, self._timeout_s):
            self._listener.isolated(progress.in_words(self._isolation))
            self._isolation = progress.cut_off(self._isolation.seen)
        if self._isolation.idle_since is not None and not self._told_of_waiting:
            self._told_of_waiting = True
            self._listener.waiting_alone(self._give_up_s)
        if progress.is_hopeless(self._isolation, self._give_up_s):
            self._listener.out_of_reach(
                f"the rendezvous was out of reach for {self._give_up_s:g} s, and no rank runs here (--join-timeout)"
            )
        else:
            self._look_later()

    def _signs(self) -> Signs:
        ranks = tuple(self._pids())
        pids = [pid for rank in ranks for pid in (rank, *tree.descendants(rank))]
        cpu_s = sum(stat.cpu_s for stat in map(process_stat, pids) if stat is not None)
        return Signs(self._loop.time(), cpu_s, self._output_bytes(), len(ranks), self._step())
