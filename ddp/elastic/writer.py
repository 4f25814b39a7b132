"""Commits on their way to disk, beside the training.

One thread, one commit at a time. The caller goes on at once; only if the commit before is still being
written does it wait, so that a slow disk slows the training down instead of filling the memory. What goes
wrong is raised at the next commit. A file gets its name when all of it is on the disk: until then it ends
in `.part`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from ddp import commits
from ddp.elastic import image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class CommitError(OSError):
    """A commit did not reach the disk."""


class Writer:
    def __init__(self, folder: Path, keep: int, prunes: bool) -> None:
        self._folder, self._keep, self._prunes = folder, keep, prunes
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def write(self, source: image.Image, name: commits.DiskName, done: Callable[[], None]) -> None:
        """`source` must stay as it is until `done` is called."""
        self.flush()
        arguments = (source, name, done)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ddp-commit", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Waits for what is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Of a commit that has failed since it was last asked."""
        error, self._error = self._error, None
        if error is not None:
            reason = error.strerror or str(error)
            raise CommitError(
                f"a commit could not be written to {self._folder}: {reason}; training itself is as it was. "
                "Make room, or State(folder=...) elsewhere"
            ) from error

    def _run(self, source: image.Image, name: commits.DiskName, done: Callable[[], None]) -> None:
        try:
            write_file(self._folder / commits.file_name(name), source)
            if self._prunes:
                self._prune()
        except OSError as error:
            self._error = error
        finally:
            done()

    def _prune(self) -> None:
        for file in commits.outdated(os.listdir(self._folder), self._keep):
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
