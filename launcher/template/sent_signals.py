"""The signals that the zygote gets in the place of the agent: from its ranks, or as one of all processes of a job.

Under torchrun, the parent of a rank is the launcher, and a rank that sends SIGTERM to its parent stops the job. Here
its parent is the zygote. None of these signals ends it: it reads them from a descriptor, together with their sender.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import NamedTuple

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(signal.Signals[name] for name in _NAMES)
_SIZE_OF_SET, _SIZE_OF_REPORT = 128, 128
_NUMBER_ERRNO_CODE_SENDER = struct.Struct("=IiiI")  # the first fields of the kernel's struct signalfd_siginfo


class SentSignal(NamedTuple):
    signum: int
    sender: int


class SentSignals:
    """They are blocked as well as ignored, so that a signal for a rank that is being forked is not lost."""

    def __init__(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._answers = {each: signal.signal(each, signal.SIG_IGN) for each in _SIGNALS}
        self.fd = _signalfd()

    def read(self) -> list[SentSignal]:
        """Return those that processes have sent: what a terminal sends, it sends to the agent too."""
        found = []
        while self.fd >= 0:
            try:
                report = os.read(self.fd, _SIZE_OF_REPORT)
            except BlockingIOError:
                break
            signum, _errno, code, sender = _NUMBER_ERRNO_CODE_SENDER.unpack_from(report)
            if code <= 0:
                found.append(SentSignal(signum, sender))
        return found

    def become_rank(self, handled_by_launcher: str) -> None:
        """Hear them again. A program that torchrun starts ignores none that torchrun handles, also under nohup."""
        if self.fd >= 0:
            os.close(self.fd)
        for signum, answer in self._answers.items():
            if answer is signal.SIG_IGN and signum.name in handled_by_launcher.split(","):
                answer = signal.default_int_handler if signum is signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, answer)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _signalfd() -> int:
    bits = sum(1 << (each - 1) for each in _SIGNALS)
    wanted = ctypes.create_string_buffer(bits.to_bytes(_SIZE_OF_SET, "little"), _SIZE_OF_SET)
    return int(ctypes.CDLL(None).signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC))
