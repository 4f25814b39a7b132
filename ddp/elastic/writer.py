"""Write commits to disk in the background.

One thread writes one commit at a time. The caller continues at once. It waits only while the previous commit is still
being written, so that a slow disk slows the training down instead of filling the memory. Errors are stored under the
number of their commit until the caller asks for them.

Each rank writes the file of its part. The rank that finishes last adds the manifest (`manifest`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ddp.elastic import commits, image, manifest
from ddp.elastic.part_file import Encoder

if TYPE_CHECKING:
    from ddp.elastic.dcp_keys import Names
    from ddp.elastic.folder import Folder
    from ddp.elastic.scratch import Slot


class CommitError(OSError):
    """A commit did not reach the disk."""


class Writer:
    """Writes the commits of one rank to a folder, one at a time."""

    def __init__(
        self, folder: Folder, keep: int, prunes: bool, lineage: str, since: commits.CommitName
    ) -> None:
        """`lineage`: the lineage of new commits; `since`: the commit from which this generation resumed."""
        self._folder, self._keep, self._prunes = folder, keep, prunes
        self._lineage, self._since = lineage, since
        self._encoder, self._maker = Encoder(), manifest.Maker()
        self._thread: threading.Thread | None = None
        self._failed: dict[int, Exception] = {}  # by the number of the commit

    def write(self, slot: Slot, name: commits.DiskName, names: Names) -> None:
        """Write a slot to disk. The slot is not overwritten until the write has finished."""
        self._wait()
        slot.pinned = True
        thread = threading.Thread(target=self._run, args=(slot, name, names), name="ddp-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread: write in the foreground
            self._run(slot, name, names)
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
            which = ", ".join(map(str, numbers))
            raise CommitError(
                f"commit {which} could not be written to {self._folder.name}: {reason}. Training can continue. "
                "Free disk space, or use State(folder=...) on another disk"
            ) from error

    def _run(self, slot: Slot, name: commits.DiskName, names: Names) -> None:
        try:
            source = image.Image(slot.buffer)
            self._folder.write(commits.file_name(name), self._encoder.encode(source, names))
            manifest.complete(self._folder, self._maker, name)
            if self._prunes:
                self._prune()
        except Exception as error:
            self._failed[name.commit.number] = error
        finally:
            slot.pinned = False

    def _prune(self) -> None:
        files = list(self._folder.files())
        self._folder.remove(commits.files_to_remove(files, self._keep, self._lineage, self._since))
