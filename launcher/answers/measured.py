"""Lines for charts: what the scripts of this node measure (`ddp.log`), over steps, and how much of the node is used.

All are bounded. The line of a name is that of the lowest rank of the node that logs it. A line that is full drops
every second point, and then takes points half as often, so it covers the whole job.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.health.watcher import RankWatcher
from rendezvous.values.questions import LoggedPoint, LoggedSeen, LoggedValue, LoggedWanted

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.health.pages import Pages

MOST_NAMES, MOST_POINTS = 32, 400
_EVERY_S = 1.0
_MOST_CHARS = 64


@dataclass(slots=True)
class _Line:
    rank: int
    points: list[LoggedPoint] = field(default_factory=list)
    every: int = 1
    offered: int = 0

    def offer(self, point: LoggedPoint) -> None:
        self.offered += 1
        if self.offered % self.every:
            return
        self.points.append(point)
        if len(self.points) > MOST_POINTS:
            self.points = self.points[1::2]
            self.every *= 2


class _Lines:
    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._number = 0  # of the last point

    def offer(self, rank: int, generation: int, at: float, value: LoggedValue) -> None:
        line = self._lines.get(value.name)
        if line is None and len(self._lines) >= MOST_NAMES:
            return
        if line is None or rank < line.rank:
            line = self._lines[value.name] = _Line(rank)
        if rank == line.rank:
            self._number += 1
            line.offer(LoggedPoint(self._number, value.name, value.step, value.value, generation, at))

    def seen(self, after: int) -> LoggedSeen:
        """The points since the point with this number."""
        points = [
            point for line in list(self._lines.values()) for point in line.points if point.number > after
        ]
        return LoggedSeen(tuple(sorted(points, key=lambda point: point.number)), self._number)


class Measured(RankWatcher):
    what = "reading what the script has logged"

    def __init__(self, pages: Pages, alarm: Callable[[str, int], None], boundary: ErrorBoundary) -> None:
        """`alarm(words, rank)`: a number is not finite, in the words that a script would print."""
        super().__init__(boundary)
        self._pages, self._alarm = pages, alarm
        self._lines, self._of_node = _Lines(), _Lines()
        self._latest: dict[int, dict[str, LoggedValue]] = {}

    def pause_s(self) -> float:
        return _EVERY_S

    def begin(self, generation: int) -> None:
        self._latest = {}
        super().begin(generation)

    def look(self) -> None:
        before, now = self._pages.values()
        self._take(before, self._generation - 1)
        self._take(now, self._generation)

    def _take(self, lines: Iterable[tuple[int, bytes]], generation: int) -> None:
        at = time.time()
        for rank, line in lines:
            for name, step, value in _numbers_in(line):
                self._note(rank, generation, at, LoggedValue(name, step, f"{value:.6g}"))
                if not math.isfinite(value):
                    self._alarm(f"{name}: {value}", rank)

    def _note(self, rank: int, generation: int, at: float, value: LoggedValue) -> None:
        latest = self._latest.setdefault(rank, {})
        if value.name in latest or len(latest) < MOST_NAMES:
            latest[value.name] = value
        self._lines.offer(rank, generation, at, value)

    def note_use(self, use: Mapping[str, float]) -> None:
        """What the node uses now: a point of each of its lines."""
        at = time.time()
        for value in use_values(use):
            self._of_node.offer(0, self._generation, at, value)

    def latest(self, rank: int) -> tuple[LoggedValue, ...]:
        return tuple(self._latest.get(rank, {}).values())

    def numbers(self) -> list[tuple[int, str, float]]:
        """The latest numbers, with rank and name."""
        self._boundary.called(self.what, self.look, None)
        return [
            (rank, name, float(each.value))
            for rank in sorted(self._latest)
            for name, each in self._latest[rank].items()
        ]

    def first(self) -> dict[str, float | str]:
        """The latest number of each name, of the lowest rank that logs it; as text if JSON does not have it."""
        found: dict[str, float | str] = {}
        for _, name, value in self.numbers():
            found.setdefault(name, value if math.isfinite(value) else str(value))
        return found

    def all(self) -> tuple[LoggedSeen, LoggedSeen]:
        return self._lines.seen(0), self._of_node.seen(0)

    def seen(self, wanted: LoggedWanted) -> LoggedSeen:
        return (self._of_node if wanted.of_node else self._lines).seen(wanted.after)


def use_values(use: Mapping[str, float]) -> tuple[LoggedValue, ...]:
    return tuple(LoggedValue(name, 0, f"{value:.6g}") for name, value in use.items())


def _numbers_in(line: bytes) -> Iterator[tuple[str, int, float]]:
    """Of one call. A rank may have corrupt memory, so any bytes are read without an error."""
    try:
        step, values = json.loads(line)
        found = [(str(name)[:_MOST_CHARS], int(step), float(value)) for name, value in values.items()]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return
    yield from ((name, step, value) for name, step, value in found if abs(step) < 2**62)
