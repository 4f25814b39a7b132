"""Writes lines to a terminal, a pipe or a file. It shows whole lines only, and does not block.

The descriptor is the user's and shared with other processes, so O_NONBLOCK must not be set on it. Terminals and pipes
are opened again through /proc, which gives a separate description that may be non-blocking. If that fails (a socket; a
terminal of another user), a thread relays from an internal pipe. Disk files and /dev/null do not block.

What the reader does not take is queued, up to QUEUE_LIMIT. What happens then depends on the reader:

* A terminal: the writer waits for a share of the time that has passed, so that a slow terminal delays a rank by at most
  that share. Then lines are skipped, and a message reports how many and where they are.
* A pipe, a socket or a file: no line is skipped. `is_full` asks the caller to bring no more lines until `has_room`
  (launcher/output/logs.py).

Lines go out in writes of at most PIPE_BUF, cut between lines. A pipe takes such a write as
one, so lines stay whole even if other processes write to the same pipe. Lines that a full disk does not take are
counted, and `lost_lines` returns a message to show elsewhere.

The bottom rows of a terminal may be a live area (launcher/output/live_area.py). It is erased before lines are written,
and drawn again below them. While the launcher is in the background, the terminal belongs to another program: lines are
still written, but the area is not.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import termios
import threading
import time
from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Any

from launcher.output import live_area
from launcher.output.lines import can_redraw
from launcher.output.live_area import LiveBlock, Size

_Block = tuple[bytes, str | None]  # whole lines, and the log that also has them; None: the launcher's own

QUEUE_LIMIT = 2 * 1024 * 1024
FRONT_SIZE = 256 * 1024
PATIENCE_SHARE = 0.1
PATIENCE_MAX_S = 0.1
RELAY_READ = 64 * 1024
_DEFAULT_SIZE = Size(80, 24)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def same_place(fd: int, other: int) -> bool:
    """Return whether two descriptors lead to the same terminal, pipe or file (as after `2>&1`)."""
    try:
        a, b = os.fstat(fd), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev)


class Terminal:
    """One output, used by one thread. While `is_idle` is false, wait for EPOLLOUT on `fd`."""

    def __init__(self, fd: int, is_colored: bool = False) -> None:
        self.fd = -1
        self.is_tty = False
        self.is_drawn = False  # a terminal that has a live area
        self._is_colored = is_colored
        self._relay: threading.Thread | None = None
        self._queue: deque[_Block] = deque()
        self._queued = 0
        self._front = b""  # written from _at on
        self._front_blocks: list[_Block] = []  # the blocks it consists of
        self._at = 0
        self._blocks = True
        self._skipped = 0
        self._skipped_logs: dict[str, None] = {}
        self._lost = 0
        self._lost_logs: dict[str, None] = {}
        self._lost_why = ""
        self._disk_is_full = False
        self._torn = False  # the last line written lacks its end
        self.writer: object | None = None  # of an unfinished line, which another writer ends first
        self._status = ""
        self._bars: tuple[LiveBlock, ...] = ()
        self._area = b""  # as shown on the screen
        self._area_columns = 0  # of the window when it was drawn
        self._wraps_anew = live_area.wraps_anew(os.environ)
        self._patience_s = PATIENCE_MAX_S
        self._patience_at = time.monotonic()
        self.is_gone = False
        self.missed_lines = False  # some lines are only in the logs: a slow reader, a full disk
        try:
            self._open(fd)
        except OSError:  # started with this descriptor closed
            self.is_gone = True

    @property
    def is_idle(self) -> bool:
        return self._at >= len(self._front) and not self._queue

    def put(self, lines: bytes, log: str) -> None:
        """Queue whole lines. A slow terminal skips them. `log` is the file that has them in full."""
        if self.is_gone or not lines:
            return
        if self.is_tty and self._is_skipping(lines):
            self.missed_lines = True
            self._skipped += lines.count(b"\n")
            self._skipped_logs[log] = None
            return
        self._append(lines, log)

    def _is_skipping(self, lines: bytes) -> bool:
        return bool(self._skipped) or not (self._fits(len(lines)) or self._wait_for_room(len(lines)))

    @property
    def is_full(self) -> bool:
        """Whether the caller must wait with more lines. Never for a terminal, which skips lines instead."""
        return not self.is_tty and not self.is_gone and self._pending >= QUEUE_LIMIT

    @property
    def has_room(self) -> bool:
        """Whether enough was read since `is_full`: the streams must not start and stop with every write."""
        return self.is_gone or self._pending <= QUEUE_LIMIT // 2

    def say(self, text: str) -> None:
        """Queue lines of the launcher itself. They are skipped only if the queue is twice its limit."""
        if not self.is_gone and self._pending < 2 * QUEUE_LIMIT:
            self.end_line()
            self._append(text.encode("utf-8", "replace").rstrip(b"\n") + b"\n")

    def end_line(self) -> None:
        if self.writer is not None and not self.is_gone:
            self.writer = None
            self._append(b"\n")

    def set_status(self, text: str) -> None:
        if self.is_drawn:
            self._status = text

    def set_area(self, blocks: tuple[LiveBlock, ...]) -> None:
        self._bars = blocks

    def forget_area(self) -> None:
        """Leave what is on the screen as it is: another program has written below it."""
        self._area = b""

    def size(self) -> Size:
        try:
            columns, rows = os.get_terminal_size(self.fd)
        except OSError:
            return _DEFAULT_SIZE
        return Size(columns or _DEFAULT_SIZE.columns, rows or _DEFAULT_SIZE.rows)

    def flush(self) -> None:
        """Write as much as the terminal takes now."""
        while not self.is_gone and self._compose():
            try:
                self._at += os.write(self.fd, memoryview(self._front)[self._at : self._piece_end()])
                self._disk_is_full = self._torn = False
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_SPACE:
                    self._lose_front(os.strerror(error.errno))
                else:
                    self.give_up()  # the reader has left, or the terminal is closed: the job continues

    def lost_lines(self, is_over: bool) -> str:
        """Return a message, once, about lines that a full disk rejected: after it takes lines again, or at the end."""
        if not self._lost or (self._disk_is_full and not is_over):
            return ""
        lost = f"{_counted(self._lost)} missing in this output{_where(self._lost_logs)}"
        self._lost = 0
        self._lost_logs.clear()
        return f"could not be written ({self._lost_why}): {lost}"

    def close(self, deadline: float | None) -> None:
        """Erase the live area, write the rest, and release the descriptor. None: however long the reader takes."""
        self._status, self._bars = "", ()
        self.flush()
        while not self.is_idle and not self.is_gone and self._wait(deadline):
            self.flush()
        self.missed_lines = self.missed_lines or not (self.is_idle or self.is_gone)
        self.give_up()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._relay:
            self._relay.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _open(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        self.is_tty = os.isatty(fd)
        self.is_drawn = can_redraw(self.is_tty, os.environ)
        if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not self.is_tty):
            self.fd = os.dup(fd)
            return
        self._blocks = False
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self.fd = os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:
            self.fd = self._start_relay(os.dup(fd))

    def _start_relay(self, fd: int) -> int:
        source, sink = os.pipe()
        os.set_blocking(sink, False)
        self._relay = threading.Thread(target=_relay, args=(source, fd), name="log-relay", daemon=True)
        self._relay.start()
        return sink

    @property
    def _pending(self) -> int:
        return self._queued + len(self._front) - self._at

    def _fits(self, size: int) -> bool:
        return self._pending + size <= QUEUE_LIMIT

    def _append(self, lines: bytes, log: str | None = None) -> None:
        self._queue.append((lines, log))
        self._queued += len(lines)

    def _compose(self) -> bool:
        """Compose the next bytes to write from the queue, in one piece. Return False if there are none."""
        if self._at < len(self._front):
            return True
        if self._skipped and self._queued < QUEUE_LIMIT // 2:
            self._tell_of_skipped()
        window = self.size() if self.is_drawn else _DEFAULT_SIZE
        area = self._next_area(window) if self.is_drawn else b""
        if not self._queue and area == self._area:
            return False
        blocks, size = 0, 0
        for block, _ in self._queue:
            blocks, size = blocks + 1, size + len(block)
            if size >= FRONT_SIZE:
                break
        self._front_blocks = list(islice(self._queue, blocks))
        lines = b"".join(block for block, _ in self._front_blocks)
        self._at = 0
        narrower = window.columns if self._wraps_anew and window.columns < self._area_columns else 0
        self._front = live_area.erased(self._area, narrower) + (b"\n" if self._torn else b"") + lines + area
        for _ in range(blocks):  # last, because `is_idle` may be read meanwhile
            self._queue.popleft()
        self._queued -= size
        self._area, self._area_columns = area, window.columns
        return True

    def _tell_of_skipped(self) -> None:
        told = f"{_counted(self._skipped)} not shown here because the terminal is too slow{_where(self._skipped_logs)}"
        self._skipped = 0
        self._skipped_logs.clear()
        self.say(f"ddp-launch: {told}")

    def _lose_front(self, reason: str) -> None:
        left = len(self._front) - self._at
        for block, log in reversed(self._front_blocks):
            if left > 0 and log is not None:
                self._lost += block[-left:].count(b"\n") + (not block.endswith(b"\n"))
                self._lost_logs[log] = None
                self.missed_lines = True
            left -= len(block)
        self._disk_is_full, self._lost_why = True, reason
        self._torn = self._front[self._at - 1 : self._at] != b"\n" if self._at else self._torn
        self._front = b""
        self._at = 0

    def _next_area(self, size: Size) -> bytes:
        if not self._is_in_foreground():
            self.forget_area()
            return b""
        return live_area.drawn(self._bars, self._status, size, self._is_colored)

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # not the terminal of this session, so its shell does not use it
            return True

    def _piece_end(self) -> int:
        if self._blocks:
            return len(self._front)
        end = self._at + select.PIPE_BUF
        if end >= len(self._front):
            return len(self._front)
        return self._front.rfind(b"\n", self._at, end) + 1 or end

    def _wait_for_room(self, size: int) -> bool:
        self.flush()
        now = time.monotonic()
        earned = (now - self._patience_at) * PATIENCE_SHARE
        deadline = now + min(PATIENCE_MAX_S, self._patience_s + earned)
        while not self._fits(size) and not self.is_gone and self._wait(deadline):
            self.flush()
        self._patience_at = time.monotonic()
        self._patience_s = max(0.0, deadline - self._patience_at)
        return self._fits(size)

    def _wait(self, deadline: float | None) -> bool:
        """Return False if the deadline passes first."""
        left = None if deadline is None else deadline - time.monotonic()
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return (left is None or left > 0) and bool(poll.poll(None if left is None else left * 1000))

    def give_up(self) -> None:
        """Drop all output. The descriptor stays open until `close`, so that its number is not reused earlier."""
        self.is_gone = True
        self._queue.clear()
        self._queued = self._at = 0
        self._front = b""


def _counted(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines} lines"


def _where(logs: Collection[str]) -> str:
    """Return "" if there is no file, as for messages of other machines."""
    folder = os.path.commonpath(logs) if len(logs) > 1 else next(iter(logs), "")
    return f"; the log: {folder}" if folder else ""


def write_from_background() -> None:
    """Let this thread write to the terminal from the background too, where `stty tostop` would stop the launcher."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})


def _relay(source: int, fd: int) -> None:
    write_from_background()
    try:
        while chunk := os.read(source, RELAY_READ):
            view = memoryview(chunk)
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:  # another process made the description non-blocking
                    select.select((), (fd,), ())
    except OSError:  # the reader has left; closing this end informs the writer
        pass
    finally:
        os.close(source)
        os.close(fd)


# The settings of the terminal that ranks read from: who shows what is typed, and what a dying rank leaves changed.

_STDIN = 0
_LOCAL_FLAGS = 3  # place in what tcgetattr returns


class Keyboard:
    def __init__(self) -> None:
        self._before = _settings()

    def restore(self) -> None:
        """Restore what was set at the start, unless another program uses the terminal now."""
        if self._before is None or _settings() in (None, self._before) or not _is_in_foreground():
            return
        try:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._before)
        except termios.error:  # the terminal is gone
            pass


def ends_lines() -> bool:
    """Whether the terminal itself edits and shows what is typed, and moves to the next line after it."""
    settings = _settings()
    wanted = termios.ICANON | termios.ECHO
    return settings is not None and settings[_LOCAL_FLAGS] & wanted == wanted


def is_raw() -> bool:
    """Whether a program reads single keys from the terminal."""
    settings = _settings()
    return settings is not None and not settings[_LOCAL_FLAGS] & termios.ICANON


def _settings() -> list[Any] | None:
    try:
        return termios.tcgetattr(_STDIN)
    except termios.error:
        return None


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False
