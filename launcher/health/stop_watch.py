"""Watches the conditions of `--stop-when`, and reports the first that is true as the failure of a rank.

launcher/health/stop_watch.py decides. The output arrives on the thread of the log pump, in pieces.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher import error_boundary
from launcher.exchange import ConditionMet
from launcher.health.watcher import RankWatcher
from launcher.output.lines import RankLabel, without_color
from rendezvous.values.contracts import CONDITION_MET
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.settings.spec import StopCondition
    from rendezvous.values.rank_view import RankView


# Decides whether a condition of `--stop-when` is true. Pure: of output in pieces.

_LONGEST_LINE = 4096
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Met:
    """A condition is true, because of this."""

    condition: str
    because: str

    def __str__(self) -> str:
        return f'the condition "{self.condition}" of --stop-when is true: {self.because}'


class LineRules:
    def __init__(self, conditions: Sequence[StopCondition]) -> None:
        self._rules = [(each.text, re.compile(each.pattern.encode(), re.MULTILINE)) for each in conditions]

    def __bool__(self) -> bool:
        return bool(self._rules)

    def scan(self, rest: bytes, chunk: bytes) -> tuple[Met | None, bytes]:
        """Look at the lines that the chunk completes. Return the unfinished line, for the next call."""
        data = (rest + chunk).replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:]
        if len(rest) > _LONGEST_LINE:
            whole, rest = data, b""
        return self.found_in(without_color(whole)), rest

    def found_in(self, text: bytes) -> Met | None:
        for condition, pattern in self._rules:
            if text and (found := pattern.search(text)):
                start = text.rfind(b"\n", 0, found.start()) + 1
                line = text[start:].partition(b"\n")[0].decode(errors="replace").strip()
                return Met(condition, f"{line[:_SHOWN_CHARS]!r}")
        return None


_EVERY_S = 1.0
_CLOCK = "%Y-%m-%d %H:%M:%S"


class StopWatch(RankWatcher):
    what = "checking the conditions of --stop-when"

    def __init__(
        self,
        conditions: Sequence[StopCondition],
        views: Callable[[], Sequence[RankView]],
        folders: Callable[[], dict[int, str]],
        report: Callable[[ConditionMet], None],
        boundary: ErrorBoundary,
    ) -> None:
        """`folders`: the log folders of the ranks that run."""
        self._lines = LineRules(conditions)
        self._views, self._folders, self._report = views, folders, report
        super().__init__(boundary)
        self._rest: dict[tuple[int, int, str], bytes] = {}
        self._said: dict[int, str] = {}  # by rank: the last status text

    @property
    def reads_output(self) -> bool:
        return bool(self._lines)

    def pause_s(self) -> float:
        return _EVERY_S if self._lines else 0.0

    # --- output, on the thread of the pump -------------------------------------------------------------

    def output(self, label: RankLabel, stream: str, chunk: bytes) -> None:
        key = (label.generation, label.rank, stream)
        met, rest = self._lines.scan(self._rest.get(key, b""), chunk)
        self._rest[key] = rest
        if met is not None:
            error_boundary.call_in(self._loop, self._met, met, label.generation, label.rank, label.local_rank)

    # --- what the script measures --------------------------------------------------------------------

    def logged(self, words: str, rank: int) -> None:
        """A number of `ddp.log` that is not finite, in the words that a script would print."""
        met = self._lines.found_in(words.encode())
        local_rank = next((n for n, view in enumerate(self._views()) if view.rank == rank), -1)
        if met is not None and local_rank >= 0:
            self._met(met, self._generation, rank, local_rank)

    # --- what the pages show -------------------------------------------------------------------------

    def look(self) -> None:
        views = list(self._boundary.called("reading the status pages for --stop-when", self._views, ()))
        for local_rank, view in enumerate(views):
            if view.message and view.message != self._said.get(view.rank):
                self._said[view.rank] = view.message
                if met := self._lines.found_in(view.message.encode()):
                    self._met(met, self._generation, view.rank, local_rank)

    def _met(self, met: Met, generation: int, rank: int, local_rank: int) -> None:
        if generation != self._generation:
            return
        self._generation = -1  # once per generation
        folder = self._folders().get(rank, "")
        view = next((view for view in self._views() if view.rank == rank), None)
        cause = Cause(
            node="",  # the service knows whose report it is
            rank=rank,
            local_rank=local_rank,
            failure=FailureClass.USER_EXCEPTION,
            reason=str(met),
            exit_code=CONDITION_MET,
            step=view.step or None if view is not None else None,
            at=time.strftime(_CLOCK),
            log=os.path.join(folder, "stdout.log") if folder else "",
            final=True,
        )
        self._report(ConditionMet(generation, cause))
