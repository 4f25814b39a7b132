"""Carries a rank's output: channel -> pump thread -> the rank's file and the terminal.

A channel is a pipe, or a pseudo-terminal if the stream is shown on a terminal (`launcher.output.rank_stream`). One
daemon thread per agent waits on all channels at once. Apart from output it wakes only for a progress bar that is due or
a request of the control thread. The control thread never writes to the terminal and never waits for it. `say`,
`progress` and the end of a generation are requests that the pump runs between two chunks, so that their lines are whole
too. Streams belong to the pump. One lock protects what both threads use.

Files come first: a chunk is in its file before it is shown. If a terminal is too slow, lines are skipped and a message
reports it (`launcher.output.terminal`). If the reader of a pipe is too slow, ranks wait for it
(`launcher.output.throttle`). If a disk is full, the file loses bytes, reported once. The job continues.

    <directory>/generation_<g>/rank_<r>/{stdout,stderr}.log   raw bytes (beyond a limit: in *.log.1 before); of a rank
                                                              with a terminal its lines, without colours
    <directory>/generation_<g>/rank_<r>                       a link, if the rank has kept its process
    <directory>/generation_<g>/filtered_{stdout,stderr}.log   matching lines of all ranks that are shown
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from launcher.output import lines, rank_stream
from launcher.output.keyboard import Keyboard
from launcher.output.lines import RankLabel
from launcher.output.log_file import LogFiles, link_folder
from launcher.output.rank_display import LiveDisplay, display_of, label_columns
from launcher.output.rank_stream import (
    PIPE_SIZE,
    READ_SIZE,
    STREAM_NAMES,
    Channels,
    FilteredFiles,
    LatestStreams,
    RankStream,
    key_of,
)
from launcher.output.terminal import Terminal, same_place, write_from_background
from launcher.output.throttle import NOTICE_AFTER_S, Backlogs, Throttle
from launcher.settings.spec import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.output.rank_display import RankDisplay, Shown
    from launcher.output.rank_stream import Move
    from launcher.settings.spec import LogSpec

__all__ = ["LogPump", "RankLabel"]


class LogPump:
    def __init__(
        self,
        log: LogSpec,
        directory: str,
        out_fd: int = 1,
        err_fd: int = 2,
        file_limit: int = 0,
    ) -> None:
        self._log = log
        self._directory = directory
        self.files = LogFiles(file_limit, self._complain)
        self._newest = -1  # generation
        self.received = 0  # bytes from all ranks: shows whether they write anything
        self._err_fd = err_fd
        self._err = self._open_terminal(err_fd)
        self._out = self._err if same_place(out_fd, err_fd) else self._open_terminal(out_fd)
        self._terminals = [self._err] if self._out is self._err else [self._out, self._err]
        self._filtered = FilteredFiles(log, directory, file_limit, self._complain)
        self._streams: dict[int, RankStream] = {}  # by descriptor
        self._bars: dict[int, RankStream] = {}  # those that show something later if nothing more is written
        self.input_wait: Callable[[int], int | None] = lambda _rank: None  # see Workers.input_wait
        self._live = LiveDisplay(lambda rank: self.input_wait(rank))
        self._channels = Channels()
        self.latest = LatestStreams()
        self._lock = threading.Lock()  # guards the two below
        self._requests: deque[Callable[[], None]] = deque()
        self._complained = False
        self._deadline: float | None = None  # of close, for terminals
        self._is_abandoned = False  # nobody waits any more for readers
        self._left: dict[int, int] | None = None  # at the end: what each pipe may still hold
        self._shown_all = False
        self._times_blocked = 0
        self._over = threading.Event()
        self.lacks_beginnings = False  # the limit has removed bytes from a log file
        self._keyboard = Keyboard()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._throttle = Throttle(self._epoll)
        self._backlogs = Backlogs(self._epoll)
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    # --- for the control thread -------------------------------------------------------------------

    def open_rank(self, label: RankLabel) -> tuple[int, int]:
        """Return the write ends of a rank's stdout and stderr. The caller closes its copies after the fork."""
        self._begin(label.generation)
        return self._open_stream(label, Streams.OUT), self._open_stream(label, Streams.ERR)

    def carry_over(self, moves: Sequence[Move]) -> None:
        """Continue the streams of ranks that keep their processes. Call it before `open_rank` of the new generation.

        Their files stay where they are, and a link leads there from the folder of the new generation.
        """
        moved = self.latest.move(moves)
        self._ask(lambda: self._relabel(moved))
        for folder, label in {os.path.dirname(stream.file.path): label for stream, label in moved}.items():
            link_folder(folder, self.rank_directory(label))
            self._begin(label.generation)

    def _begin(self, generation: int) -> None:
        """Close the pipes of old generations: a process that runs two generations longer is no longer read."""
        if generation <= self._newest:
            return  # once per generation: a search for each rank would be quadratic
        self._newest = generation
        self.latest.forget_before(generation - 1)
        self._ask(lambda: self._retire(generation - 1))

    def rank_directory(self, label: RankLabel) -> str:
        return os.path.join(self._directory, f"generation_{label.generation}", f"rank_{label.rank}")

    def stderr_tail(self, rank: int, generation: int) -> bytes:
        return self.latest.last_words(rank, generation, Streams.ERR)

    def catch_up(self, rank: int, generation: int, done: Callable[[], object]) -> None:
        """Read what is in this rank's pipes now, for the tails. The pump thread then calls `done`."""

        def read_on() -> None:
            for stream in self.latest.of(rank, generation):
                self._empty(stream)
            done()

        self._ask(read_on)

    def say(self, text: str) -> None:
        """Show lines of the launcher itself on stderr."""
        if not self._over.is_set():
            self._ask(lambda: self._err.say(text))
            return
        if self._is_abandoned:
            return
        with contextlib.suppress(OSError):
            os.write(self._err_fd, text.encode("utf-8", "replace").rstrip(b"\n") + b"\n")

    def progress(self, text: str) -> None:
        """Set the live line in the bottom row if stderr is a terminal; "" removes it."""
        if self._err.is_tty:
            self._ask(lambda: self._err.set_status(text))
            self._ask(self._live.look_again)

    def resized(self, done: Callable[[], None]) -> None:
        """Adapt to the terminal's new size. The pump thread then calls `done`."""
        self._ask(self._resize)
        self._ask(done)

    def resumed(self) -> None:
        """Draw below what another program has written while the launcher was stopped."""
        for terminal in self._terminals:
            self._ask(terminal.forget_area)

    def blocked_ranks(self) -> list[int]:
        """Return the ranks that wait until somebody reads the output of this command."""
        streams = (self._streams.get(fd) for fd in self._throttle.blocked())
        return [
            each.label.rank for each in streams if each is not None and each.label.generation == self._newest
        ]

    def prompting_ranks(self) -> set[int]:
        return self._live.prompting_ranks()

    def signs_of_life(self) -> int:
        """Return a number that changes while ranks write, or would write if their reader let them."""
        self._times_blocked += bool(self._throttle.blocked())
        return self.received + self._times_blocked

    def close(self, timeout_s: float) -> bool:
        """Read what is in the pipes now, show it, and end. Wait for pipes until their reader leaves, or `abandon`.

        A terminal has `timeout_s`; what it does not show in this time is dropped.
        Return False if some lines were never shown, at any time, and are only in the log files.
        """
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout_s
                os.eventfd_write(self._wake, 1)
        self._over.wait()
        return self._shown_all

    def abandon(self) -> None:
        """End `close` now. Drop what is not shown."""
        with self._lock:
            self._is_abandoned = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._over.set()

    def _open_stream(self, label: RankLabel, stream: Streams) -> int:
        path = os.path.join(self.rank_directory(label), f"{STREAM_NAMES[stream]}.log")
        is_shown = lines.is_shown(self._log, label.local_rank, stream)
        terminal = (self._out if stream is Streams.OUT else self._err) if is_shown else None
        if terminal and terminal.is_drawn and self._log.terminal == "auto":
            channel = self._channels.open_terminal(*self._size_for(label, terminal))
        else:
            channel = rank_stream.open_pipe()
        display = display_of(self._log, label, terminal, channel.is_terminal) if terminal else None
        new = RankStream(label, stream, channel, self.files.open(path, key_of(label, stream)), display)
        self.latest.add(new)
        self._streams[new.fd] = new
        self._epoll.register(new.fd, select.EPOLLIN)
        return channel.sink

    def _size_for(self, label: RankLabel, terminal: Terminal) -> tuple[int, int]:
        """Return the rows and columns that a rank has beside its label."""
        size = terminal.size()
        return size.rows, max(1, size.columns - label_columns(self._log, label))

    def _open_terminal(self, fd: int) -> Terminal:
        return Terminal(fd, lines.is_colored(self._log.color, os.isatty(fd), os.environ))

    def _ask(self, request: Callable[[], None]) -> None:
        with self._lock:
            if self._wake < 0:
                return
            self._requests.append(request)
            os.eventfd_write(self._wake, 1)

    def _complain(self, text: str) -> None:
        with self._lock:
            if self._complained:
                return
            self._complained = True
        self.say(f"ddp-launch: log file {text}; the job goes on")

    # --- the pump thread --------------------------------------------------------------------------

    def _run(self) -> None:
        write_from_background()
        try:
            while self._deadline is None:
                self._round(self._time_to_next_update())
            self._finish(self._deadline)
        finally:
            self._over.set()

    def _finish(self, deadline: float) -> None:
        # A process that has escaped may write for ever: what counts is what its pipe holds now.
        self._left = dict.fromkeys(self._streams, PIPE_SIZE)
        self._run_until(lambda: not self._throttle.is_holding)
        for stream in list(self._streams.values()):
            self._end(stream)
        self._err.end_line()  # what may still come there is of the launcher
        self._write(is_over=True)
        self._run_until(lambda: all(each.is_idle or each.is_tty for each in self._terminals))
        for terminal in self._terminals:
            terminal.close(deadline if terminal.is_tty or self._is_abandoned else None)
        self._shown_all = not self._is_abandoned and not any(each.missed_lines for each in self._terminals)
        self._keyboard.restore()
        with self._lock:
            self._epoll.close()
            os.close(self._wake)
            self._wake = -1

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        """Handle what arrives until it is done and no rank has written more. Wait only while it is not done."""
        for terminal in self._terminals:
            self._backlogs.watch(terminal)
        while not self._is_abandoned:
            was_done = is_done()
            if not self._round(0.0 if was_done else None) and was_done:
                return

    def _round(self, timeout_s: float | None) -> bool:
        """Wait once, and handle all that arrived. Return whether any rank wrote something."""
        ready = self._epoll.poll(timeout_s)
        now = time.monotonic()
        had_output = False
        for fd, _ in ready:
            if fd == self._wake:
                os.eventfd_read(fd)
            elif stream := self._streams.get(fd):
                if stream.terminal is None or not self._throttle.holds_back(fd, stream.terminal, now):
                    had_output = True
                    self._read(stream, now)
        self._show_due_updates(now)
        self._run_requests()
        if self._throttle.is_active:
            self._report_slow_readers(now)
        self._live.draw(now)
        self._write(is_over=False)
        if self._throttle.is_active:
            self._throttle.release()
        for terminal in self._terminals:
            self._backlogs.watch(terminal)
        return had_output

    def _time_to_next_update(self) -> float | None:
        bars = [bar for bar in self._bars.values() if bar.terminal and not bar.terminal.is_full]
        times = [bar.display.due_at() for bar in bars if bar.display]
        times += [self._throttle.notice_due_at(), self._live.due_at()]
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _report_slow_readers(self, now: float) -> None:
        for terminal in self._throttle.to_report(now):
            if terminal is not self._err:
                waited = f"was not read for {NOTICE_AFTER_S:g} s"
                self._err.say(f"ddp-launch: standard output {waited}; ranks that print wait until it is read")

    def _run_requests(self) -> None:
        with self._lock:
            requests = list(self._requests)
            self._requests.clear()
        for request in requests:
            request()

    def _read(self, stream: RankStream, now: float) -> None:
        try:
            chunk = rank_stream.read(stream.fd)
        except BlockingIOError:
            return
        if not chunk:
            self._end(stream)
            return
        self.received += len(chunk)
        if not stream.has_terminal:
            stream.file.write(chunk)
        self.latest.keep_tail(stream, chunk)
        if stream.display:
            self._show(stream, stream.display, stream.display.feed(chunk, now))
        if self._left is not None:
            self._left[stream.fd] -= len(chunk)
            if self._left[stream.fd] <= 0:
                self._end(stream)

    def _empty(self, stream: RankStream) -> None:
        """Read at most one pipe capacity: a process may still write, and the loop would not end."""
        now = time.monotonic()
        for _ in range(PIPE_SIZE // READ_SIZE + 1):
            if self._streams.get(stream.fd) is stream:
                self._read(stream, now)

    def _show(self, stream: RankStream, display: RankDisplay, shown: Shown) -> None:
        if stream.has_terminal and shown.record:
            stream.file.write(shown.record)
        if shown.text:
            display.terminal.put(display.labelled(shown.text), stream.file.path)
            self._filtered.add(stream, display, shown.text)
        self._live.update(display, at_once=bool(shown.text))
        if display.due_at() is not None:
            self._bars[stream.fd] = stream
        else:
            self._bars.pop(stream.fd, None)

    def _show_due_updates(self, now: float) -> None:
        for stream in list(self._bars.values()):
            if stream.display and stream.terminal and not stream.terminal.is_full:
                self._show(stream, stream.display, stream.display.update(now))

    def _resize(self) -> None:
        for stream in list(self._streams.values()):
            if stream.has_terminal and stream.terminal:
                rank_stream.resize(stream.fd, *self._size_for(stream.label, stream.terminal))

    def _relabel(self, moved: list[tuple[RankStream, RankLabel]]) -> None:
        for stream, label in moved:
            self.files.move(key_of(stream.label, stream.stream), key_of(label, stream.stream))
            stream.relabel(self._log, label)
            if stream.display and self._streams.get(stream.fd) is stream:
                self._live.update(stream.display, at_once=False)
        self._resize()  # a longer label leaves less room

    def _end(self, stream: RankStream) -> None:
        del self._streams[stream.fd]
        if stream.display:
            self._show(stream, stream.display, stream.display.finish(time.monotonic()))
        self._bars.pop(stream.fd, None)
        self._throttle.remove(stream.fd)
        self._channels.close(stream.fd, stream.has_terminal)
        stream.file.close()
        self.lacks_beginnings = self.lacks_beginnings or stream.file.lacks_its_beginning

    def _retire(self, before: int) -> None:
        for stream in list(self._streams.values()):
            if stream.label.generation < before:
                self._end(stream)
        self._filtered.retire(before)

    def _write(self, is_over: bool) -> None:
        for terminal in self._terminals:
            terminal.flush()
        for terminal in self._terminals:
            if lost := terminal.lost_lines(is_over):
                which = "output" if terminal is self._out else "error"
                other = self._out if is_over and terminal is self._err else self._err
                other.say(f"ddp-launch: standard {which} {lost}")
                other.flush()
