"""Carries a rank's output: channel -> pump thread -> the rank's file and the terminal.

A channel is a pipe, or a pseudo-terminal if the stream is shown on a terminal (`launcher.output.logs`). One
daemon thread per agent waits on all channels at once. Apart from output it wakes only for a progress bar that is due or
a request of the control thread. The control thread never writes to the terminal and never waits for it. `say`,
`progress` and the end of a generation are requests that the pump runs between two chunks, so that their lines are whole
too. Streams belong to the pump. One lock protects what both threads use.

Files come first: a chunk is in its file before it is shown. If a terminal is too slow, lines are skipped and a message
reports it (`launcher.output.terminal`). If the reader of a pipe is too slow, ranks wait for it
(`launcher.output.logs`). If a disk is full, the file loses bytes, reported once. The job continues.

    <directory>/generation_<g>/rank_<r>/{stdout,stderr}.log   raw bytes (beyond a limit: in *.log.1 before); of a rank
                                                              with a terminal its lines, without colours
    <directory>/generation_<g>/rank_<r>                       a link, if the rank has kept its process
    <directory>/generation_<g>/filtered_{stdout,stderr}.log   matching lines of all ranks that are shown
    <directory>/merged.log                                    with --merged-log: lines of all ranks, with their times
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from launcher.output import lines
from launcher.output.lines import CUT, TRACEBACK_HEADER, RankLabel, without_color
from launcher.output.log_file import LogFile, LogFiles, MergedLog, StreamKey, link_folder
from launcher.output.rank_display import LiveDisplay, RankDisplay, ShownText, display_of, label_columns
from launcher.output.terminal import Keyboard, Terminal, same_place, write_from_background
from launcher.settings.spec import LogSpec, Streams
from rendezvous.values.cause_text import counted
from rendezvous.values.late_dataclass import dataclass

__all__ = ["LogPump", "RankLabel"]


class LogPump:
    def __init__(
        self, log: LogSpec, directory: str, out_fd: int = 1, err_fd: int = 2, file_limit: int = 0
    ) -> None:
        self._log = log
        self._directory = directory
        self.files = LogFiles(file_limit, self._complain)
        self._newest = -1  # generation
        self.is_consequence: Callable[[bytes], bool] = lambda _traceback: False
        self._left_out: dict[
            int, list[tuple[RankStream, bytes]]
        ] = {}  # by rank: tracebacks, see `lines.folded`
        self.received = 0  # bytes from all ranks: shows whether they write anything
        self._err_fd = err_fd
        self._err = self._open_terminal(err_fd)
        self._out = self._err if same_place(out_fd, err_fd) else self._open_terminal(out_fd)
        self._terminals = [self._err] if self._out is self._err else [self._out, self._err]
        self._filtered = FilteredFiles(log, directory, file_limit, self._complain)
        self._merged = (
            MergedLog(log.prefix, directory, file_limit, self._complain) if log.merged_log else None
        )
        self._held: list[lines.HeldLine[RankStream]] = []  # on a terminal, for equal lines of other ranks
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
        self._is_explained = False  # the end of the job
        self._is_abandoned = False  # the command does not wait for readers any more
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
            self._ask(lambda: self._say(text))
            return
        if self._is_abandoned:
            return
        with contextlib.suppress(OSError):
            os.write(self._err_fd, text.encode("utf-8", "replace").rstrip(b"\n") + b"\n")

    def say_of_failure(self, text: str, is_explained: bool) -> None:
        """Show a line about a failure. If it explains the tracebacks that were left out, it only counts them."""
        self._ask(lambda: self._say(text + self._consequences(is_explained)))

    def _say(self, text: str) -> None:
        self._show_held()
        self._err.say(text)

    def _consequences(self, is_explained: bool) -> str:
        left_out, self._left_out = self._left_out, {}
        if not is_explained:
            for stream, traceback in chain(*left_out.values()):
                self._put(stream, traceback)
        if not left_out or not is_explained:
            return ""
        return f"; {counted(len(left_out), 'other rank')} lost a connection: see the logs"

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
        """Return the ranks that wait until a reader takes the output of this command."""
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

    def close(self, timeout_s: float, is_explained: bool = False) -> bool:
        """Read what is in the pipes now, show it, and end. Wait for pipes until their reader leaves, or `abandon`.

        `is_explained`: what is printed after this says why ranks have lost their peers.

        A terminal has `timeout_s`; what it does not show in this time is dropped.
        Return False if some lines were never shown, at any time, and are only in the log files.
        """
        self._is_explained = is_explained
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
            channel = open_pipe()
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
        self._consequences(self._is_explained)
        self._show_held()
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
        if self._held:
            self._show_first(lines.count_of_due(self._held, now, self._writers()))
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
        times += [
            self._throttle.notice_due_at(),
            self._live.due_at(),
            *[each.until for each in self._held[:1]],
        ]
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
            chunk = read(stream.fd)
        except BlockingIOError:
            return
        if not chunk:
            self._end(stream)
            return
        self.received += len(chunk)
        if not stream.has_terminal:
            self._record(stream, chunk)
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

    def _show(self, stream: RankStream, display: RankDisplay, shown: ShownText) -> None:
        if stream.has_terminal and shown.record:
            self._record(stream, shown.record)
        text = shown.text
        if stream.stream is Streams.ERR and not self._log.verbose:
            stream.fold, text, left_out = lines.folded(stream.fold, text, self.is_consequence)
            if left_out:
                self._leave_out(stream, left_out)
        self._put(stream, text)
        self._filtered.add(stream, display, shown.text)
        self._live.update(display, at_once=bool(shown.text))
        if display.due_at() is not None:
            self._bars[stream.fd] = stream
        else:
            self._bars.pop(stream.fd, None)

    def _leave_out(self, stream: RankStream, traceback: bytes) -> None:
        self._left_out.setdefault(stream.label.rank, []).append((stream, traceback))

    def _record(self, stream: RankStream, text: bytes) -> None:
        stream.file.write(text)
        if self._merged:
            self._merged.add(stream.fd, stream.label, text)

    def _put(self, stream: RankStream, text: bytes) -> None:
        if self._is_held(stream, text):
            kind = STREAM_NAMES[stream.stream]
            self._held = lines.hold(self._held, stream, kind, text, time.monotonic())
            self._show_first(max(0, len(self._held) - lines.MOST_HELD))
        elif text:
            self._show_held()
            self._put_now(stream, text)
        if stream.display and stream.display.is_unfinished:  # a prompt, which belongs below
            self._show_held()

    def _is_held(self, stream: RankStream, text: bytes) -> bool:
        """Whether the text waits for equal lines of other ranks."""
        is_drawn = stream.terminal is not None and stream.terminal.is_drawn and self._log.collapse
        if not is_drawn or not text.endswith(b"\n") or text.count(b"\n") > lines.MOST_HELD:
            return False
        return bool(self._held) or len(self._writers()[STREAM_NAMES[stream.stream]]) > 1

    def _writers(self) -> dict[str, frozenset[RankStream]]:
        """Return what ranks show, by the kind of stream."""
        shown = [each for each in self._streams.values() if each.display]
        return {name: frozenset(s for s in shown if s.stream is kind) for kind, name in STREAM_NAMES.items()}

    def _put_now(self, stream: RankStream, text: bytes) -> None:
        if stream.display is not None:
            stream.display.terminal.put(stream.display.labelled(text), stream.file.path)

    def _show_held(self) -> None:
        self._show_first(len(self._held))

    def _show_first(self, count: int) -> None:
        shown, self._held = self._held[:count], self._held[count:]
        for stream, text in lines.shown_once(shown, lambda each: each.label.rank):
            self._put_now(stream, text)

    def _show_due_updates(self, now: float) -> None:
        for stream in list(self._bars.values()):
            if stream.display and stream.terminal and not stream.terminal.is_full:
                self._show(stream, stream.display, stream.display.update(now))

    def _resize(self) -> None:
        for stream in list(self._streams.values()):
            if stream.has_terminal and stream.terminal:
                resize(stream.fd, *self._size_for(stream.label, stream.terminal))

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
            rest, is_folding = stream.fold
            if rest and is_folding:  # the rank was stopped while it wrote
                self._leave_out(stream, rest)
            else:
                self._put(stream, rest)
        self._bars.pop(stream.fd, None)
        if self._merged:
            self._merged.end(stream.fd, stream.label)
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


# --- the streams of a rank -------------------------------------------------------------------------
#
# One output stream of one rank: its channel, its file, and its last bytes.

STREAM_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}
TAIL_LIMIT = 64 * 1024
_BEGINNING_LIMIT = 8 * 1024
_HEADER, _CUT = TRACEBACK_HEADER.encode(), f"\n{CUT}\n".encode()


def key_of(label: RankLabel, stream: Streams) -> StreamKey:
    return label.generation, label.rank, STREAM_NAMES[stream]


class RankStream:
    """One channel of one rank, and where its bytes go. It belongs to the pump, except its tail."""

    def __init__(
        self, label: RankLabel, stream: Streams, channel: Channel, file: LogFile, display: RankDisplay | None
    ) -> None:
        self.label = label
        self.stream = stream
        self.fd = channel.source
        self.has_terminal = channel.is_terminal
        self.file = file
        self.display = display  # None: the stream goes to its file only
        self.fold = lines.NO_FOLD
        self.tail = bytearray()
        self.beginning = b""  # of the last traceback that started before the tail

    def relabel(self, log: LogSpec, label: RankLabel) -> None:
        self.label = label
        if self.display is not None:
            self.display.relabel(log, label)

    @property
    def terminal(self) -> Terminal | None:
        return self.display.terminal if self.display else None

    def keep_tail(self, chunk: bytes) -> None:
        self.tail += chunk[-TAIL_LIMIT:]
        if len(self.tail) > 2 * TAIL_LIMIT:
            self.beginning = self._last_beginning()
            del self.tail[:-TAIL_LIMIT]

    def forget_tail(self) -> None:
        self.tail.clear()
        self.beginning = b""

    def last_words(self) -> bytes:
        """Return the tail, preceded by the beginning of a traceback that it may belong to, the most useful part.

        A carriage return in the tail excludes the beginning: a progress bar ran since, so the rank survived.
        """
        tail = without_color(bytes(self.tail[-TAIL_LIMIT:]))
        beginning = self._last_beginning()
        if not beginning or _HEADER in tail or b"\r" in tail:
            return tail
        return beginning + _CUT + tail.partition(b"\n")[2]

    def _last_beginning(self) -> bytes:
        before_tail = max(0, len(self.tail) - TAIL_LIMIT)
        if self.stream is not Streams.ERR or not before_tail:
            return self.beginning
        at = self.tail.rfind(_HEADER, 0, before_tail + len(_HEADER) - 1)
        return self.beginning if at < 0 else bytes(self.tail[at : at + _BEGINNING_LIMIT])


# --- channels ---------------------------------------------------------------------------------------
#
# How a rank's stream reaches the pump: through a pipe, or through a pseudo-terminal if a person watches.
#
# Libraries show bars and colours only on a terminal, so a stream that is shown on one gets a pseudo-terminal. It
# passes bytes on as a pipe does: nothing is translated. It controls no process, so it sends no signals.
#
# The machine has a limited number of pseudo-terminals, which logins need as well. After TERMINALS_LIMIT, and if the
# system gives none, streams get pipes.

# Large enough for a burst. The pipes of one user share 64 MiB before the kernel makes new ones small.
PIPE_SIZE = 256 * 1024
READ_SIZE = 64 * 1024
TERMINALS_LIMIT = 256  # of one agent; Linux has 4,096 by default
_OUTPUT_FLAGS = 1  # place in what tcgetattr returns


@dataclass(frozen=True, slots=True)
class Channel:
    source: int  # the agent's end, non-blocking
    sink: int  # the rank's end
    is_terminal: bool


def open_pipe() -> Channel:
    source, sink = os.pipe()
    os.set_blocking(source, False)
    with contextlib.suppress(OSError):  # a smaller pipe also works
        fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    return Channel(source, sink, False)


class Channels:
    """Opened by the control thread, closed by the pump's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminals = 0

    def open_terminal(self, rows: int, columns: int) -> Channel:
        """Open a pseudo-terminal, or a pipe if that is not possible."""
        with self._lock:
            if self._terminals >= TERMINALS_LIMIT:
                return open_pipe()
            self._terminals += 1
        opened = _open_terminal(rows, columns)
        if opened is None:
            with self._lock:
                self._terminals -= 1
        return opened or open_pipe()

    def close(self, source: int, is_terminal: bool) -> None:
        os.close(source)
        with self._lock:
            self._terminals -= is_terminal


def _open_terminal(rows: int, columns: int) -> Channel | None:
    try:
        source, sink = os.openpty()
    except OSError:
        return None
    try:
        mode = termios.tcgetattr(sink)
        mode[_OUTPUT_FLAGS] &= ~termios.OPOST
        termios.tcsetattr(sink, termios.TCSANOW, mode)
        resize(source, rows, columns)
        os.set_blocking(source, False)
    except (OSError, termios.error):
        os.close(source)
        os.close(sink)
        return None
    return Channel(source, sink, True)


def resize(source: int, rows: int, columns: int) -> None:
    termios.tcsetwinsize(source, (rows, columns))


def read(source: int) -> bytes:
    """Return what has arrived, b"" at the end of the stream. Raise BlockingIOError if nothing has.

    A pseudo-terminal gives 4 KiB at a time. After its last writer it gives an error instead of an end.
    """
    pieces: list[bytes] = []
    size = 0
    while size < READ_SIZE:
        try:
            piece = os.read(source, READ_SIZE - size)
        except BlockingIOError:
            if not pieces:
                raise
            break
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            break  # if something came before, the next call finds the end again
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if len(piece) > 4096:  # a pipe: one call is enough
            break
    return b"".join(pieces)


# --- latest streams ---------------------------------------------------------------------------------
#
# The streams of the latest generations by rank, and what ranks wrote last: for the pump and the control thread.

Move = tuple["RankLabel", "RankLabel"]  # of a rank that keeps its process: its label before, and its new one


class LatestStreams:
    """The lock guards the map, and the tail of every stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, int, Streams], RankStream] = {}
        # Called on the pump's thread with all output, if there is a watcher.
        self.on_output: Callable[[RankLabel, str, bytes], None] | None = None

    def add(self, stream: RankStream) -> None:
        with self._lock:
            self._streams[stream.label.generation, stream.label.rank, stream.stream] = stream

    def keep_tail(self, stream: RankStream, chunk: bytes) -> None:
        with self._lock:
            stream.keep_tail(chunk)
        if self.on_output is not None:
            self.on_output(stream.label, str(stream.stream), chunk)

    def last_words(self, rank: int, generation: int, which: Streams) -> bytes:
        with self._lock:
            found = self._streams.get((generation, rank, which))
            return found.last_words() if found else b""

    def of(self, rank: int, generation: int) -> list[RankStream]:
        with self._lock:
            found = (self._streams.get((generation, rank, which)) for which in (Streams.OUT, Streams.ERR))
            return [stream for stream in found if stream is not None]

    def forget_before(self, generation: int) -> None:
        with self._lock:
            for key in [key for key in self._streams if key[0] < generation]:
                del self._streams[key]

    def move(self, moves: Iterable[Move]) -> list[tuple[RankStream, RankLabel]]:
        """Find the streams of ranks that keep their processes under their new labels. Return them with these.

        Their tails begin again: what such a rank wrote before says nothing about a failure that comes later.
        """
        with self._lock:
            moved = [
                (stream, after)
                for before, after in moves
                for which in (Streams.OUT, Streams.ERR)
                if (stream := self._streams.pop((before.generation, before.rank, which), None)) is not None
            ]
            for stream, after in moved:
                stream.forget_tail()
                self._streams[after.generation, after.rank, stream.stream] = stream
        return moved


# --- filtered files ---------------------------------------------------------------------------------
#
# The files of --duplicate-stdout-filters and --duplicate-stderr-filters: lines of all ranks that match.


class FilteredFiles:
    def __init__(
        self, log: LogSpec, directory: str, file_limit: int, complain: Callable[[str], None]
    ) -> None:
        self._directory, self._file_limit, self._complain = directory, file_limit, complain
        self._needles = {
            Streams.OUT: lines.any_of(log.stdout_filters),
            Streams.ERR: lines.any_of(log.stderr_filters),
        }
        self._files: dict[tuple[int, Streams], LogFile] = {}

    def add(self, stream: RankStream, display: RankDisplay, text: bytes) -> None:
        """Write those of these lines that match."""
        if needle := self._needles[stream.stream]:
            text = lines.without_color(text) if stream.has_terminal else text
            text = text if text.endswith(b"\n") else text + b"\n"  # a part of a line that is long, or redrawn
            self._file(stream).write(lines.prefixed(lines.matching(text, needle), display.prefix))

    def retire(self, before: int) -> None:
        """Close the files of the generations before this one."""
        for key in [key for key in self._files if key[0] < before]:
            self._files.pop(key).close()

    def _file(self, stream: RankStream) -> LogFile:
        key = (stream.label.generation, stream.stream)
        if key not in self._files:
            name = f"filtered_{STREAM_NAMES[stream.stream]}.log"
            path = os.path.join(self._directory, f"generation_{key[0]}", name)
            self._files[key] = LogFile(path, self._file_limit, self._complain)
        return self._files[key]


# --- a limit for what is shown ---------------------------------------------------------------------
#
# Holds streams back whose reader is slow: no line is lost in a pipe, and memory stays bounded.
#
# A terminal may skip lines, because a person cannot read faster. A pipe or a file may not: a program counts on every
# byte. So while the queue of such an output is full, the pump does not read the pipes of the ranks that write to it.
# These pipes fill, and a rank that writes more waits in `write`, as it does under torchrun. Only the ranks wait: the
# pump and the agent continue, and so do heartbeats and the answers to signals.
#
# A rank that waits like this is not the reason for a hang. `blocked` finds these ranks by how full their pipes are.

NOTICE_AFTER_S = 10.0
# The kernel puts two writes into one page if both fit. So a pipe that is full holds at least half of its size.
_FULL_SHARE = 0.5


class Throttle:
    """Used by the pump's thread, except `blocked`."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._lock = threading.Lock()
        self._held: dict[int, Terminal] = {}  # by descriptor of the stream
        self._full_since: dict[Terminal, float] = {}
        self._reported: set[Terminal] = set()

    @property
    def is_active(self) -> bool:
        """Whether some output is full."""
        return bool(self._full_since)

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def holds_back(self, fd: int, terminal: Terminal, now: float) -> bool:
        """Whether the stream must wait for its reader. From then on the pump does not hear of it until `release`."""
        if not (terminal.is_full and _stays_full(terminal)):
            return False
        self._epoll.unregister(fd)
        with self._lock:
            self._held[fd] = terminal
        self._full_since.setdefault(terminal, now)
        return True

    def release(self) -> None:
        """Read the streams again whose output has room."""
        ready = [terminal for terminal in self._full_since if terminal.has_room]
        for terminal in ready:
            del self._full_since[terminal]
            self._reported.discard(terminal)
            for fd in [fd for fd, its in self._held.items() if its is terminal]:
                self._epoll.register(fd, select.EPOLLIN)
                self._forget(fd)

    def remove(self, fd: int) -> None:
        """Forget a stream that ends, and take it out of the epoll set."""
        if fd in self._held:
            self._forget(fd)
        else:
            self._epoll.unregister(fd)

    def _forget(self, fd: int) -> None:
        with self._lock:
            del self._held[fd]

    def notice_due_at(self) -> float | None:
        """Return when to report that an output is not read."""
        if not self._full_since:
            return None
        since = [at for terminal, at in self._full_since.items() if terminal not in self._reported]
        return min(since) + NOTICE_AFTER_S if since else None

    def to_report(self, now: float) -> list[Terminal]:
        """Return the outputs that were not read for a while, each once."""
        due = [
            terminal
            for terminal, at in self._full_since.items()
            if terminal not in self._reported and at + NOTICE_AFTER_S <= now
        ]
        self._reported.update(due)
        return due

    def blocked(self) -> list[int]:
        """Return the descriptors of the held streams whose pipe is full. For any thread."""
        with self._lock:
            return [fd for fd in self._held if _is_full(fd)]


def _stays_full(terminal: Terminal) -> bool:
    terminal.flush()
    return terminal.is_full


def _is_full(fd: int) -> bool:
    try:
        (size,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))
        capacity = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    except OSError:
        return False
    return bool(size >= _FULL_SHARE * capacity)


class Backlogs:
    """Wakes the pump when a terminal that was too slow takes more, and at no other time: an idle pump must sleep."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._waited: dict[int, None] = {}  # descriptors

    def watch(self, terminal: Terminal) -> None:
        is_behind = not terminal.is_idle
        if is_behind == (terminal.fd in self._waited):
            return
        if is_behind:
            self._waited[terminal.fd] = None
            self._epoll.register(terminal.fd, select.EPOLLOUT)
        else:
            del self._waited[terminal.fd]
            self._epoll.unregister(terminal.fd)
