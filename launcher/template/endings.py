"""The order in which ranks end.

If several ranks have ended since the last look, `waitpid` returns them in the order of their start. The order of their
ends is evidence: a rank that ended after another one may have lost its connection to it. So the kernel is asked twice.
A descriptor of a process becomes readable when the process ends, and epoll returns the descriptors in that order.
"""

from __future__ import annotations

import contextlib
import os
import select

from .process_stat import process_stat


class Endings:
    def __init__(self) -> None:
        self._poll: select.epoll | None = None
        self._pids: dict[int, int] = {}  # by descriptor
        self._ended: list[int] = []  # to be reaped

    def watch(self, pid: int) -> None:
        """Without descriptors of processes (an old kernel, macOS), the order of near ends is that of `waitpid`."""
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(pid)
            self._pids[fd] = pid
            self._poll = self._poll or select.epoll()
            self._poll.register(fd, select.EPOLLIN | select.EPOLLET)

    def _take(self) -> list[int]:
        """Return the processes that have ended since the last call, in the order of their ends."""
        if self._poll is None:
            return []
        ended = []
        for fd, _events in self._poll.poll(0):
            ended.append(self._pids.pop(fd))
            self._poll.unregister(fd)  # closing is not enough: ranks that are being forked have copies
            os.close(fd)
        return ended

    def next(self) -> int:
        """Return the process to reap next: the rank that ended first, or else any other child; 0 if none has ended."""
        if not self._ended:
            self._ended = self._take()
        if not self._ended:
            with contextlib.suppress(ChildProcessError):
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if (
                    found is not None and found.si_pid in self._pids.values()
                ):  # and perhaps another one before it
                    self._ended = self._take()
                if found is not None and not self._ended:
                    return found.si_pid
        return self._ended.pop(0) if self._ended else 0

    def forget(self) -> None:
        """In a forked child."""
        for fd in self._pids:
            os.close(fd)
        if self._poll is not None:
            self._poll.close()


def has_ended(pid: int) -> bool:
    """Whether a child that is not reaped yet has ended, as far as a signal can change it."""
    stat = process_stat(pid)
    return stat is None or stat.is_exiting
