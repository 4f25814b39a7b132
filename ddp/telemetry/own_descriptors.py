"""Descriptors that an observer holds in a process of somebody else's.

A program may close every descriptor that it does not know, as daemons do, and open files of its own under the same
numbers. An observer that goes on to use these numbers reads what is not its own, and writes into it.
"""

from __future__ import annotations

import os


class OwnDescriptors:
    def __init__(self, *fds: int) -> None:
        self._identities = {fd: _identity(fd) for fd in fds}

    def are_open(self) -> bool:
        """Whether all of them are what they were."""
        try:
            return all(_identity(fd) == known for fd, known in self._identities.items())
        except OSError:
            return False


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino
