"""Decides whether a condition of `--stop-when` is true. Pure: of output in pieces, and of steps over time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.output.lines import without_color
from launcher.settings.spec import Logged, Slow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.settings.spec import StopCondition

_LONGEST_LINE = 4096
_SHOWN_CHARS = 200
_SAMPLES = 20  # in the time of a condition


@dataclass(frozen=True, slots=True)
class Met:
    """A condition is true, because of this."""

    condition: str
    because: str

    def __str__(self) -> str:
        return f'the condition "{self.condition}" of --stop-when is true: {self.because}'


class LineRules:
    def __init__(self, conditions: Sequence[StopCondition]) -> None:
        self._rules = [
            (each.text, re.compile(each.pattern.encode(), re.MULTILINE))
            for each in conditions
            if isinstance(each, Logged)
        ]

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


@dataclass(frozen=True, slots=True)
class Throughput:
    """The steps of this node's slowest rank over time. The best speed is kept over restarts, the samples are not."""

    condition: Slow
    best: float = 0.0  # steps per second
    samples: tuple[tuple[float, int], ...] = ()

    @property
    def period_s(self) -> float:
        return self.condition.for_s / _SAMPLES

    def begun(self) -> Throughput:
        """The ranks have started again: the time of the restart does not count."""
        return replace(self, samples=())

    def added(self, now: float, steps: int | None) -> tuple[Throughput, Met | None]:
        """`steps`: None if a rank has not finished its first step."""
        if steps is None:
            return self, None
        known = (
            self.samples if self.samples and steps >= self.samples[-1][1] else ()
        )  # or the script renumbers them
        for_s = self.condition.for_s
        samples = (*known, (now, steps))
        while len(samples) > 1 and now - samples[1][0] >= for_s:
            samples = samples[1:]
        then, before = samples[0]
        if now - then < for_s:
            return replace(self, samples=samples), None
        speed = (steps - before) / (now - then)
        met = self._met(speed) if speed < self.condition.share * self.best else None
        return replace(self, samples=samples, best=max(self.best, speed)), met

    def _met(self, speed: float) -> Met:
        percent = 100 * speed / self.best
        because = f"{speed:.3g} steps/s, {percent:.0f} % of the best, {self.best:.3g} steps/s"
        return Met(self.condition.text, because)
