"""Holds streams back whose reader is slow: no line is lost in a pipe, and memory stays bounded.

A terminal may skip lines, because a person cannot read faster. A pipe or a file may not: a program counts on every
byte. So while the queue of such an output is full, the pump does not read the pipes of the ranks that write to it.
These pipes fill, and a rank that writes more waits in `write`, as it does under torchrun. Only the ranks wait: the pump
and the agent continue, and so do heartbeats and the answers to signals.

A rank that waits like this is not the reason for a hang. `blocked` finds these ranks by how full their pipes are.
"""

from __future__ import annotations

import fcntl
import select
import struct
import termios
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.output.terminal import Terminal

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
