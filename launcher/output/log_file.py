"""A private file for raw bytes. It never stops the job: it reports a failure instead of raising it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class LogFile:
    """With a limit, the file and its predecessor (`.1`) hold the latest bytes."""

    def __init__(self, path: str, limit: int, complain: Callable[[str], None]) -> None:
        self.path = path
        self._limit = limit
        self._complain = complain
        self._size = 0
        self._fd = -1
        self._rotations = 0
        self._open()

    @property
    def lacks_its_beginning(self) -> bool:
        """Whether the limit has removed bytes."""
        return self._rotations > 1

    def write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        if self._limit and self._size and self._size + len(data) > self._limit:
            self._rotate()
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:  # the next chunk tries again: there may be space by then
            self._complain(f"{self.path} is incomplete: {error.strerror}")
        self._size += len(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> None:
        self._size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            _make_private(os.path.dirname(self.path))
            self._fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            self._complain(f"cannot write {self.path}: {error.strerror}")

    def _rotate(self) -> None:
        self.close()
        self._rotations += 1
        with contextlib.suppress(OSError):  # on failure the file is truncated instead: the limit matters more
            os.replace(self.path, self.path + ".1")
        self._open()


def link_folder(folder: str, link: str) -> None:
    """Make `link` lead to `folder`, which is beside it. Not every file system has links."""
    with contextlib.suppress(OSError):
        _make_private(os.path.dirname(link))
        os.symlink(os.path.relpath(folder, os.path.dirname(link)), link)


def _make_private(directory: str) -> None:
    """Create missing folders for this user only. Existing folders stay as they are."""
    if not directory or os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
