"""Signals as callbacks of an event loop, from the first one to the last.

asyncio's own `add_signal_handler` has an end with a gap: a loop that closes gives each signal its own action back, in
the middle of the last milliseconds of a command that has long decided how it ends. One more Ctrl-C there is a
traceback, or another exit code; and to block it in the main thread only hands it to gRPC's. Here a signal is ignored
from the moment it is no longer answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SignalWatch:
    """One per process, of its main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, Callable[[], object]] = {}
        self._heard, self._woken = socket.socketpair()
        for end in (self._heard, self._woken):
            end.setblocking(False)
        self._loop.add_reader(self._heard, self._answer)
        # Full is no loss worth a word: who sends thousands of one signal is answered thousands of times less one.
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)

    def on(self, signum: int, answer: Callable[[int], object]) -> None:
        self._answers[signum] = lambda: answer(signum)
        signal.signal(signum, _leave_it_to_the_loop)
        signal.siginterrupt(signum, False)

    def close(self) -> None:
        """From here on they change nothing, up to the end of the process."""
        for signum in self._answers:
            signal.signal(signum, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        self._loop.remove_reader(self._heard)
        self._heard.close()
        self._woken.close()

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            for signum in self._heard.recv(4096):
                if signum in self._answers:
                    self._answers[signum]()


def _leave_it_to_the_loop(signum: int, frame: object) -> None:
    """A handler there must be, or nothing is written to the wake-up descriptor."""
