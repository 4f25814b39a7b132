"""A private file for raw bytes. It never stops the job: it reports a failure instead of raising it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.output import lines
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.output.lines import RankLabel


StreamKey = tuple[int, int, str]  # generation, rank, name of the stream


class LogFile:
    """With a limit, the file and its predecessor (`.1`) hold the latest bytes."""

    def __init__(
        self, path: str, limit: int, complain: Callable[[str], None], history: LogHistory | None = None
    ) -> None:
        self.path = path
        self._history = history or LogHistory()
        self._limit = limit
        self._complain = complain
        self._size = 0
        self._fd = -1
        self._rotations = 0
        self._open()

    @property
    def lacks_its_beginning(self) -> bool:
        """Whether the limit has removed bytes."""
        return self._rotations > 1

    def write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        if self._limit and self._size and self._size + len(data) > self._limit:
            self._rotate()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:] if written else data)
        except OSError as error:  # the next chunk tries again: there may be space by then
            self._complain(f"{self.path} is incomplete: {error.strerror}")
        self._size += len(data)
        if written:
            self._history.wrote(written)

    def close(self) -> None:
        self._close_file()
        self._history.closed()

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> None:
        self._size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            _make_private(os.path.dirname(self.path))
            self._fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            self._complain(f"cannot write {self.path}: {error.strerror}")

    def _rotate(self) -> None:
        self._close_file()
        self._rotations += 1
        self._history.rotated()
        with contextlib.suppress(OSError):  # on failure the file is truncated instead: the limit matters more
            os.replace(self.path, self.path + ".1")
        self._open()


def link_folder(folder: str, link: str) -> None:
    """Make `link` lead to `folder`, which is beside it. Not every file system has links."""
    with contextlib.suppress(OSError):
        _make_private(os.path.dirname(link))
        os.symlink(os.path.relpath(folder, os.path.dirname(link)), link)


@dataclass(frozen=True, slots=True)
class RankLog:
    """What one rank has written to a stream in one generation: a file, or a part of it."""

    path: str
    history: LogHistory
    first: int = 0  # offset of the first byte
    last: int | None = (
        None  # behind the last byte; None: the stream still belongs to this rank and generation
    )


class LogFiles:
    """Opens the log files of this agent's ranks, and knows what is in them: for the latest generations."""

    _MOST = 4096

    def __init__(self, limit: int, complain: Callable[[str], None]) -> None:
        self._limit, self._complain = limit, complain
        self._lock = threading.Lock()
        self._known: dict[StreamKey, RankLog] = {}

    def open(self, path: str, key: StreamKey) -> LogFile:
        history = LogHistory()
        self._add(key, RankLog(path, history))
        return LogFile(path, self._limit, self._complain, history)

    def move(self, before: StreamKey, after: StreamKey) -> None:
        """A rank keeps its process in another generation: from now on, its stream belongs to `after`."""
        log = self.known().get(before)
        if log is not None:
            size = log.history.kept().size
            self._add(before, replace(log, last=size))
            self._add(after, replace(log, first=size))

    def _add(self, key: StreamKey, log: RankLog) -> None:
        with self._lock:
            self._known[key] = log
            if len(self._known) > self._MOST:
                del self._known[next(iter(self._known))]

    def known(self) -> dict[StreamKey, RankLog]:
        """For any thread."""
        with self._lock:
            return dict(self._known)


class MergedLog:
    """The file of --merged-log. Each line begins with the time of its end, so `sort -m` merges those of the nodes."""

    def __init__(self, prefix: str, directory: str, limit: int, complain: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._file = LogFile(os.path.join(directory, "merged.log"), limit, complain)
        self._unfinished: dict[int, bytes] = {}  # by descriptor of the stream

    def add(self, stream: int, label: RankLabel, text: bytes) -> None:
        whole, newline, rest = (self._unfinished.pop(stream, b"") + text).rpartition(b"\n")
        if rest:
            self._unfinished[stream] = rest
        if newline:
            self._write(label, whole + newline)

    def end(self, stream: int, label: RankLabel) -> None:
        if rest := self._unfinished.pop(stream, b""):
            self._write(label, rest + b"\n")

    def _write(self, label: RankLabel, text: bytes) -> None:
        now = time.time()
        moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03}Z"
        prefix = f"{moment} {lines.prefix_of(self._prefix, label)}"
        self._file.write(lines.prefixed(text, prefix.encode("utf-8", "replace")))


def _make_private(directory: str) -> None:
    """Create missing folders for this user only. Existing folders stay as they are."""
    if not directory or os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)


# --- log history ------------------------------------------------------------------------------------
#
# When which bytes of a log file were written: `ddpctl logs` shows the output since a time, and in the order of time.
#
# A log file holds the rank's own bytes and nothing else, so the times are kept in memory: a mark for the first write in
# each quarter of a second. A long file has fewer marks, which are further apart. Offsets count all bytes that were ever
# written to the stream, also those that the limit of the file has removed since.
#
# The pump thread writes; any other thread reads.

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
