"""The files of the logs of a job, and their folder."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

from launcher.output import lines
from launcher.output.lines import RankLabel
from launcher.settings.arguments import UsageError
from launcher.settings.spec import LaunchSpec
from launcher.template import scratch
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

# --- files -----------------------------------------------------------------------------------------
#
# A private file for raw bytes. It never stops the job: it reports a failure instead of raising it.

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


# --- the folder ------------------------------------------------------------------------------------
#
# The folder of a job's logs: under --log-dir, or a private temporary folder that is removed after success.

ROOM = 32 << 20  # free bytes; with less, the pre-flight check of the folder would reject this node
_TEMPORARY_FILE_LIMIT = 64 << 20  # per stream of a rank, twice; the user did not request these files


class LogFolder:
    def __init__(self, spec: LaunchSpec) -> None:
        name = re.sub(r"[^\w.+-]", "_", spec.job.job_id) or "job"
        self.temporary = not spec.log.directory
        self.file_limit = _TEMPORARY_FILE_LIMIT if self.temporary else 0
        self.warning = ""
        if self.temporary:
            self.path = _temporary(f"ddp-launch-{name}-{os.getpid()}-{os.urandom(3).hex()}")
            self.warning = _why_elsewhere(self.path)
            return
        try:
            self.path = _unused(
                os.path.join(os.path.abspath(spec.log.directory), name), spec.job.max_nodes > 1
            )
        except OSError as error:  # launcher.settings.checks has found what can be detected earlier
            raise UsageError(
                f"invalid --log-dir {spec.log.directory!r}: cannot create the directory ({error.strerror}). "
                "Use another directory.",
                code=Code.FOLDER_UNUSABLE,
            ) from None

    def has_logs(self) -> bool:
        """Whether ranks were started."""
        try:
            return any(name.startswith("generation_") for name in os.listdir(self.path))
        except OSError:  # ranks may have deleted it
            return False

    def discard(self) -> None:
        """Remove the folder as far as possible; ranks may have changed or deleted it."""
        scratch.remove(self.path)


def temporary_roots() -> list[str]:
    """Where temporary folders may be, the best place first: those without room come after those that have room."""
    named = (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", ".")
    roots = (os.path.abspath(root) for root in named if root)
    return sorted(roots, key=lambda root: (not os.access(root, os.W_OK | os.X_OK), _is_full(root)))


def _is_full(root: str) -> bool:
    try:
        found = os.statvfs(root)
    except OSError:
        return False
    return (0 < found.f_blocks and found.f_bavail * found.f_frsize < ROOM) or (
        0 < found.f_files and not found.f_favail
    )


def _why_elsewhere(path: str) -> str:
    wanted = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    if os.path.dirname(path) == wanted or not _is_full(wanted):
        return ""
    reason = f"less than {ROOM >> 20} MiB or no inode is free"
    return f"{wanted} is full ({reason}): log files go to {path}. Free space in {wanted}, or set TMPDIR."


def _temporary(name: str) -> str:
    """Create the folder where Python puts temporary files. The path is absolute, as scripts may change their folder.

    The name has a random part: process numbers come again, as in a container that is started again with its old /tmp.
    """
    reason = ""
    for root in temporary_roots():
        path = os.path.join(root, name)
        try:
            os.mkdir(path, 0o700)  # fails if another user has created the name
        except OSError as error:
            reason = reason or f"{root}: {error.strerror}"
        else:
            return path
    raise UsageError(
        f"cannot create a directory for temporary files: {reason}. Set TMPDIR, or use --log-dir.",
        code=Code.FOLDER_UNUSABLE,
    )


def _unused(path: str, shared_by_nodes: bool) -> str:
    """Give a second run with the same id its own folder. The nodes of one job share theirs.

    Other users may read the folders above it but not write there, whatever the umask.
    """
    os.makedirs(os.path.dirname(path) or ".", 0o755, exist_ok=True)
    if shared_by_nodes:
        os.makedirs(path, 0o700, exist_ok=True)
        return path
    number = 1
    candidate = path
    while True:
        try:
            os.makedirs(candidate, 0o700)
        except FileExistsError:
            number += 1
            candidate = f"{path}.{number}"
        else:
            return candidate
