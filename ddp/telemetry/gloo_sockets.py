"""Which sockets of this process are Gloo's, also before it is known to which ranks they lead.

Each group of Gloo has a thread that waits with an epoll of its own. So an epoll that appears while a group is being
created belongs to Gloo, and so do the sockets in it. A script may have other ones: those of asyncio, or of gRPC.

The number of a descriptor is used again once the group is gone. An epoll counts as the same one only if it still has a
socket that it had when its group was created.

Gloo leaves a message unread if its receiver has given up the memory for it, and a message unsent if its sender has. The
kernel reports such a socket again and again, so Gloo's thread uses a whole core until the group is destroyed, which the
script may never do. `report_once` lets the kernel report it once more, and then only what is new.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_ENTRY = re.compile(
    r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)\s+pos:\s*\S+\s+ino:\s*([0-9a-f]+)",
    re.MULTILINE,
)
_CHANGE = 3  # EPOLL_CTL_MOD
_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # struct epoll_event: events, data


class GlooSockets:
    def __init__(self) -> None:
        self._noted: dict[int, frozenset[int]] = {}  # by the descriptor of an epoll: inodes of its sockets
        self._before: list[set[int]] = []  # for each group that is being created: the epolls before it

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """A group is created within, perhaps one of Gloo."""
        before = epolls()
        self._before.append(before)
        try:
            yield
            for epoll in epolls() - before:
                self._noted[epoll] = frozenset(_inodes(watched(epoll)))
        finally:
            self._before[:] = [each for each in self._before if each is not before]

    def now(self) -> set[int]:
        """The descriptors that are watched for Gloo."""
        return set[int]().union(*map(watched, self._epolls()))

    def _epolls(self) -> Iterator[int]:
        earlier, noted = list(self._before), self._noted
        for epoll in epolls():
            is_new = any(epoll not in before for before in earlier)
            if is_new or noted.get(epoll, frozenset()).intersection(_inodes(watched(epoll))):
                yield epoll

    def report_once(self, sockets: set[int]) -> None:
        """Let Gloo's epolls report what these sockets have for it once, not all the time. `sockets`: inodes."""
        for epoll in self._epolls():
            for descriptor, events, data, inode in _entries(epoll):
                if inode in sockets:
                    event = struct.pack(_EVENT, events | select.EPOLLET, data)
                    ctypes.CDLL(None).epoll_ctl(epoll, _CHANGE, descriptor, event)  # fails if it is closed

    def forget(self) -> None:
        self._noted = {}


def epolls() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def watched(epoll: int) -> set[int]:
    """The descriptors that this process watches with an epoll."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as file:
        return set(map(int, _WATCHED.findall(file.read())))
    return set()


def _entries(epoll: int) -> list[tuple[int, int, int, int]]:
    """For each descriptor in an epoll: its number, the events, the data that belongs to it, and its inode."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as file:
        found = _ENTRY.findall(file.read())
        return [
            (int(fd), int(events, 16), int(data, 16), int(inode, 16)) for fd, events, data, inode in found
        ]
    return []


def _inodes(descriptors: Iterable[int]) -> Iterator[int]:
    for each in descriptors:
        with contextlib.suppress(OSError):
            yield os.fstat(each).st_ino
