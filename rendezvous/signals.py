"""Handle signals as callbacks of an event loop, until the process ends.

asyncio's own `add_signal_handler` is not sufficient at the end. When the loop closes, it restores the default action of
each signal, and the process still runs for some milliseconds. A second Ctrl-C during this time prints a traceback or
changes the exit code. Blocking the signal in the main thread does not help: a thread of gRPC then receives it. So this
module ignores the signals after it has removed their handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable


class SignalWatch:
    """One per process, in its main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, Callable[[], object]] = {}
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._loop.add_reader(self._reader, self._answer)
        # No warning when the buffer is full: it takes thousands of unhandled signals, and losing one does not matter.
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def on(self, signum: int, answer: Callable[[int], object]) -> None:
        self._answers[signum] = lambda: answer(signum)
        signal.signal(signum, _do_nothing)
        signal.siginterrupt(signum, False)

    def close(self) -> None:
        """Ignore these signals until the process ends."""
        for signum in self._answers:
            signal.signal(signum, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        self._loop.remove_reader(self._reader)
        self._reader.close()
        self._writer.close()

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            for signum in self._reader.recv(4096):
                if signum in self._answers:
                    self._answers[signum]()


def _do_nothing(signum: int, frame: object) -> None:
    """Python writes to the wake-up descriptor only if the signal has a handler."""
