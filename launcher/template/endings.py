"""The order in which ranks end.

If several ranks have ended since the last look, `waitpid` returns them in the order of their start. The order of their
ends is evidence: a rank that ended after another one may have lost its connection to it. So the kernel is asked twice.
A descriptor of a process becomes readable when the process ends, and epoll returns the descriptors in that order.
"""

from __future__ import annotations

import contextlib
import os
import select


class Endings:
    def __init__(self) -> None:
        self._poll: select.epoll | None = None
        self._pids: dict[int, int] = {}  # by descriptor

    def watch(self, pid: int) -> None:
        """Without descriptors of processes (an old kernel, macOS), the order of near ends is that of `waitpid`."""
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(pid)
            self._pids[fd] = pid
            self._poll = self._poll or select.epoll()
            self._poll.register(fd, select.EPOLLIN | select.EPOLLET)

    def take(self) -> list[int]:
        """Return the processes that have ended since the last call, in the order of their ends."""
        if self._poll is None:
            return []
        ended = []
        for fd, _events in self._poll.poll(0):
            ended.append(self._pids.pop(fd))
            self._poll.unregister(fd)  # closing is not enough: ranks that are being forked have copies
            os.close(fd)
        return ended

    def forget(self) -> None:
        """In a forked child."""
        for fd in self._pids:
            os.close(fd)
        if self._poll is not None:
            self._poll.close()


def has_ended(pid: int) -> bool:
    """Whether a child has ended that is not reaped yet."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True
