"""What the ranks of a soak tell while they are killed: one row of numbers for each in a file that all have mapped."""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 3
_NUMBERS = struct.Struct("4q")


class Row(NamedTuple):
    pid: int  # of the newest process of this rank
    generation: int  # in which it trains
    steps: int  # that this process has finished in this generation
    committed: int  # the newest step, also of an earlier process


class Board:
    """Each number has one writer, and is written in one piece: a reader sees a killed rank's last words."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(RANKS * _NUMBERS.size)
            self._map = mmap.mmap(file.fileno(), RANKS * _NUMBERS.size)
        self._cells = memoryview(self._map).cast("q")

    def begins(self, rank: int, pid: int) -> None:
        self._cells[4 * rank : 4 * rank + 3] = memoryview(struct.pack("3q", pid, 0, 0)).cast("B").cast("q")

    def trains(self, rank: int, generation: int) -> None:
        self._cells[4 * rank + 2] = 0
        self._cells[4 * rank + 1] = generation

    def committed(self, rank: int, step: int) -> None:
        self._cells[4 * rank + 3] = step
        self._cells[4 * rank + 2] += 1

    def committed_by_all(self) -> int:
        return min(row.committed for row in self.rows())

    def rows(self) -> list[Row]:
        return [Row(*self._cells[4 * rank : 4 * rank + 4].tolist()) for rank in range(RANKS)]
