"""When which bytes of a log file were written: `ddpctl logs` shows the output since a time, and in the order of time.

A log file holds the rank's own bytes and nothing else, so the times are kept in memory: a mark for the first write in
each quarter of a second. A long file has fewer marks, which are further apart. Offsets count all bytes that were ever
written to the stream, also those that the limit of the file has removed since.

The pump thread writes; any other thread reads.
"""

from __future__ import annotations

import threading
import time
from array import array

from rendezvous.values.late_dataclass import dataclass

_MARK_EVERY_S = 0.25
_MOST_MARKS = 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a stream at one moment."""

    before: int  # offset of the first byte in the older half (`.1`)
    start: int  # of the first byte in the file
    size: int  # behind the last byte
    is_closed: bool
    marks: tuple[
        tuple[float, int], ...
    ]  # times since the epoch, with the offset of the first byte written then


class LogHistory:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before = self._start = self._size = 0
        self._is_closed = False
        self._times, self._offsets = array("d"), array("q")

    def wrote(self, count: int) -> None:
        now = time.time()
        with self._lock:
            if not self._times or not 0.0 <= now - self._times[-1] < _MARK_EVERY_S:
                self._times.append(max(now, self._times[-1]) if self._times else now)
                self._offsets.append(self._size)
            self._size += count
            if len(self._times) > _MOST_MARKS:
                del self._times[1::2], self._offsets[1::2]

    def rotated(self) -> None:
        with self._lock:
            self._before, self._start = self._start, self._size

    def closed(self) -> None:
        with self._lock:
            self._is_closed = True

    def kept(self) -> Kept:
        with self._lock:
            marks = tuple(zip(self._times, self._offsets, strict=True))
            return Kept(self._before, self._start, self._size, self._is_closed, marks)
