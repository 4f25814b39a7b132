"""Which sockets of this process are Gloo's, also before it is known to which ranks they lead.

Each group of Gloo has a thread that waits with an epoll of its own. So an epoll that appears while a group is being
created belongs to Gloo, and so do the sockets in it. A script may have other ones: those of asyncio, or of gRPC.

The number of a descriptor is used again once the group is gone. An epoll counts as the same one only if it still has a
socket that it had when its group was created.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


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
        found, here, earlier, noted = set[int](), epolls(), list(self._before), self._noted
        for epoll in here:
            sockets = watched(epoll)
            is_new = any(epoll not in before for before in earlier)
            if is_new or noted.get(epoll, frozenset()).intersection(_inodes(sockets)):
                found |= sockets
        return found

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


def _inodes(descriptors: Iterable[int]) -> Iterator[int]:
    for each in descriptors:
        with contextlib.suppress(OSError):
            yield os.fstat(each).st_ino
