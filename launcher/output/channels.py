"""How a rank's stream reaches the pump: through a pipe, or through a pseudo-terminal if a person watches.

Libraries show bars and colours only on a terminal, so a stream that is shown on one gets a pseudo-terminal. It passes
bytes on as a pipe does: nothing is translated. It is nobody's controlling terminal, so it sends no signals.

The machine has a limited number of pseudo-terminals, which logins need as well. After TERMINALS_LIMIT, and if the
system gives none, streams get pipes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import termios
import threading

from rendezvous.values.late_dataclass import dataclass

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
