"""Keeps the journals in the folder of a service within a size: those not written for the longest time are removed.

The service removes the journal of a job together with the job. That is not enough if several replicas serve a job in
turn: each has a part of its journal on its own disk, and only one of them removes the job.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX, SUFFIX = "journal_service_", ".ddpj"
_LOOK_AGAIN = 1 << 20  # bytes that are written before the folder is read again


class JournalFolder:
    """`space`: bytes of all journals together; 0: unlimited. Used in the thread of the journals only."""

    def __init__(self, path: str, space: int) -> None:
        self.path, self._space = path, space
        self._written: set[str] = set()  # files that are open now
        self._since_look = _LOOK_AGAIN

    def opens(self, path: str) -> None:
        self._written.add(path)

    def closes(self, path: str) -> None:
        self._written.discard(path)

    def takes(self, size: int) -> None:
        """So many bytes are written next. Raise OSError if there is no room for them."""
        self._since_look += size
        if self._space and self._since_look >= _LOOK_AGAIN:
            self._since_look = 0
            self._make_room()

    def _make_room(self) -> None:
        files = sorted(self._files())
        together = sum(size for _, _, size in files)
        for _, path, size in files:
            if together <= self._space:
                return
            if path not in self._written:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                together -= size
        if together > self._space:
            self._since_look = _LOOK_AGAIN  # the next one may not write either
            why = f"the journals of running jobs need more than {self._space >> 20} MiB (--journal-space)"
            raise OSError(errno.ENOSPC, why)

    def _files(self) -> Iterator[tuple[float, str, int]]:
        """When each was written last, where it is, and its size."""
        for entry in os.scandir(self.path):
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_mtime, entry.path, found.st_size
