"""One output stream of one rank: its channel, its file, and its last bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import termios
import threading
from typing import TYPE_CHECKING

from launcher.output import lines
from launcher.output.lines import CUT, TRACEBACK_HEADER, RankLabel, without_color
from launcher.output.log_file import LogFile
from launcher.settings.spec import Streams
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from launcher.output.log_file import StreamKey
    from launcher.output.rank_display import RankDisplay
    from launcher.output.terminal import Terminal
    from launcher.settings.spec import LogSpec


STREAM_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}
TAIL_LIMIT = 64 * 1024
_BEGINNING_LIMIT = 8 * 1024
_HEADER, _CUT = TRACEBACK_HEADER.encode(), f"\n{CUT}\n".encode()


def key_of(label: RankLabel, stream: Streams) -> StreamKey:
    return label.generation, label.rank, STREAM_NAMES[stream]


class RankStream:
    """One channel of one rank, and where its bytes go. It belongs to the pump, except its tail."""

    def __init__(
        self,
        label: RankLabel,
        stream: Streams,
        channel: Channel,
        file: LogFile,
        display: RankDisplay | None,
    ) -> None:
        self.label = label
        self.stream = stream
        self.fd = channel.source
        self.has_terminal = channel.is_terminal
        self.file = file
        self.display = display  # None: the stream goes to its file only
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
# Libraries show bars and colours only on a terminal, so a stream that is shown on one gets a pseudo-terminal. It passes
# bytes on as a pipe does: nothing is translated. It is nobody's controlling terminal, so it sends no signals.
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
        # Called on the pump's thread with all output, if somebody watches it.
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

        Their tails begin anew: what such a rank wrote before says nothing about a failure that comes later.
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
