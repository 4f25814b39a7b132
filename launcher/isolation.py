"""Looks at the ranks while the service is out of reach, and only then. See launcher/progress.py for what it means."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from launcher import progress
from launcher.progress import Signs
from launcher.template import tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class IsolationWatch:
    """`tell` hears once, in words, when the ranks are to be stopped; again only after contact was there again."""

    def __init__(
        self,
        timeout_s: float,
        pids: Callable[[], Iterable[int]],
        output_bytes: Callable[[], int],
        tell: Callable[[str], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._pids, self._output_bytes, self._tell = pids, output_bytes, tell
        self._loop = asyncio.get_running_loop()
        self._isolation: progress.Isolation | None = None
        self._timer: asyncio.TimerHandle | None = None

    def contact(self, held: bool) -> None:
        if held:
            self.close()
        elif self._isolation is None:
            self._isolation = progress.cut_off(self._signs())
            self._look_later()

    def close(self) -> None:
        self._isolation = None
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(progress.next_look_s(self._timeout_s), self._look)

    def _look(self) -> None:
        assert self._isolation is not None
        self._isolation = progress.look(self._isolation, self._signs())
        if progress.is_over(self._isolation, self._timeout_s):
            self._tell(progress.in_words(self._isolation))
            self._isolation = progress.cut_off(self._isolation.seen)
        self._look_later()

    def _signs(self) -> Signs:
        pids = [pid for rank in self._pids() for pid in (rank, *tree.descendants(rank))]
        return Signs(self._loop.time(), sum(map(_cpu_s, pids)), self._output_bytes())


def _cpu_s(pid: int) -> float:
    """Of the process, and of those of its children that have ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # it has ended since
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S
