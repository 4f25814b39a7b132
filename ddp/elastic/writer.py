"""Commits on their way to disk, beside the training.

One thread, one commit at a time. The caller goes on at once; only if the commit before is still being
written does it wait, so that a slow disk slows the training down instead of filling the memory. What goes
wrong is kept, by the commit's number, until it is asked for. A file gets its name when all of it is on the
disk: until then it ends in `.part`.
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
    def __init__(
        self, folder: Path, keep: int, prunes: bool, lineage: str, since: commits.CommitName
    ) -> None:
        """`lineage` is that of what will be written, `since` the commit that was resumed from."""
        self._folder, self._keep, self._prunes = folder, keep, prunes
        self._lineage, self._since = lineage, since
        self._thread: threading.Thread | None = None
        self._failed: dict[int, Exception] = {}  # by the number of the commit

    def write(self, slot: Slot, name: commits.DiskName) -> None:
        """The slot is pinned until it has been written."""
        self._wait()
        slot.pinned = True
        thread = threading.Thread(target=self._run, args=(slot, name), name="ddp-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is none to be had: then the training waits
            self._run(slot, name)
        else:
            self._thread = thread

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def flush(self, first: int = 0) -> None:
        """Waits for what is under way, and raises what went wrong with commits of this number or a later one."""
        self._wait()
        self.raise_error(first)

    def raise_error(self, first: int = 0, before: int | None = None) -> None:
        """Of the commits from `first` on that have failed and were not yet told of."""
        numbers = [n for n in list(self._failed) if first <= n and (before is None or n < before)]
        if numbers:
            error = [self._failed.pop(number) for number in numbers][-1]
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            raise CommitError(
                f"commit {', '.join(map(str, numbers))} could not be written to {self._folder}: {reason}; training "
                "itself is as it was. Make room, or State(folder=...) elsewhere"
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
        for file in commits.outdated(os.listdir(self._folder), self._keep, self._lineage, self._since):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / file).unlink()


def write_file(path: Path, source: image.Image) -> None:
    """All of it, or nothing under this name."""
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
