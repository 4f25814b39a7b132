"""Write commits to disk in the background.

One thread writes one commit at a time. The caller continues at once. It waits only while the previous commit is still
being written, so that a slow disk slows the training down instead of filling the memory. Errors are stored under the
number of their commit until the caller asks for them. A file ends in `.part` until all of it is on disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from ddp.elastic import commits, image

if TYPE_CHECKING:
    from pathlib import Path

    from ddp.elastic.scratch import Slot


class CommitError(OSError):
    """A commit did not reach the disk."""


class Writer:
    """Writes the commits of one rank to a folder, one at a time."""

    def __init__(
        self, folder: Path, keep: int, prunes: bool, lineage: str, since: commits.CommitName
    ) -> None:
        """`lineage`: the lineage of new commits; `since`: the commit from which this generation resumed."""
        self._folder, self._keep, self._prunes = folder, keep, prunes
        self._lineage, self._since = lineage, since
        self._thread: threading.Thread | None = None
        self._failed: dict[int, Exception] = {}  # by the number of the commit

    def write(self, slot: Slot, name: commits.DiskName) -> None:
        """Write a slot to disk. The slot is not overwritten until the write has finished."""
        self._wait()
        slot.pinned = True
        thread = threading.Thread(target=self._run, args=(slot, name), name="ddp-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread: write in the foreground
            self._run(slot, name)
        else:
            self._thread = thread

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def flush(self, first: int = 0) -> None:
        """Wait for the pending commit, and raise the errors of commits with this number or a later one."""
        self._wait()
        self.raise_error(first)

    def raise_error(self, first: int = 0, before: int | None = None) -> None:
        """Raise an error if commits from `first` on have failed and were not reported yet."""
        numbers = [n for n in list(self._failed) if first <= n and (before is None or n < before)]
        if numbers:
            error = [self._failed.pop(number) for number in numbers][-1]
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            raise CommitError(
                f"commit {', '.join(map(str, numbers))} could not be written to {self._folder}: {reason}. Training can "
                "continue. Free disk space, or use State(folder=...) on another disk"
            ) from error

    def _run(self, slot: Slot, name: commits.DiskName) -> None:
        try:
            write_file(self._folder / commits.file_name(name), image.Image(slot.buffer))
            if self._prunes:
                self._prune()
        except Exception as error:
            self._failed[name.commit.number] = error
        finally:
            slot.pinned = False

    def _prune(self) -> None:
        for file in commits.files_to_remove(os.listdir(self._folder), self._keep, self._lineage, self._since):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / file).unlink()


def write_file(path: Path, source: image.Image) -> None:
    """Write the file atomically: a file with the final name is always complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + commits.UNFINISHED)
    try:
        with open(unfinished, "wb", buffering=0) as file:
            _write(file.fileno(), source)
            os.fsync(file.fileno())
        os.rename(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(fd: int, source: image.Image) -> None:
    prologue = image.for_disk(source, image.data_checksum(source.data))
    for piece in (memoryview(prologue), *image.pieces(source.whole[len(prologue) :])):
        rest = piece
        while rest:
            rest = rest[os.write(fd, rest) :]
