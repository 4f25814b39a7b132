"""Write commits to disk in the background.

One thread writes one commit at a time. The caller continues at once. It waits only while the previous commit is still
being written, so that a slow disk slows the training down instead of filling the memory. Errors are stored under the
number of their commit until the caller asks for them.

An object store can be slow or away for longer, and that never stops the training. A commit that is due while another
one is still being written is left out (`Thinning`), and a commit that fails is reported in the log.

Each rank writes the file of its part. The rank that finishes last adds the manifest (`manifest`). Then rank 0 removes
commits that are too old. On a local disk only the next write waits for that: the new commit is there already.
"""

from __future__ import annotations

import logging
import threading
import time

from ddp.elastic import commits
from ddp.elastic.commits import Thinning
from ddp.elastic.files import manifest
from ddp.elastic.files.dcp import Names
from ddp.elastic.files.folders import Folder
from ddp.elastic.files.part_file import FileEncoder
from ddp.elastic.images import image
from ddp.elastic.images.kept_images import Slot
from ddp.telemetry.coded import CodedError

log = logging.getLogger("ddp.elastic")
_AT_EXIT_S = 60.0  # the time that an object store has to take the last commit before the process ends


class CommitError(CodedError, OSError):
    """A commit did not reach the disk."""

    code = "DDP-8002"


class Writer:
    """Writes the commits of one rank to a folder, one at a time."""

    def __init__(
        self, folder: Folder, keep: int, prunes: bool, lineage: str, since: commits.CommitName
    ) -> None:
        """`lineage`: the lineage of new commits; `since`: the commit from which this generation resumed."""
        self._folder, self._keep, self._prunes = folder, keep, prunes
        self._lineage, self._since = lineage, since
        self._encoder, self._maker = FileEncoder(), manifest.Maker()
        self._thread: threading.Thread | None = None
        self._began, self._writing = 0.0, 0
        self._written = threading.Event()  # the commit of the thread is there, or has failed
        self._said: set[str] = set()  # what was wrong with removals
        self._thinning = Thinning()
        self._not_completed: set[commits.CommitName] = set()  # whose manifest cannot be made
        self._failed: dict[int, Exception] = {}  # by the number of the commit

    def takes(self, number: int, every: int) -> bool:
        """Whether to write a commit that is due at every so many; a local disk takes all."""
        if not self._folder.is_remote:
            return True
        is_busy = self._thread is not None and self._thread.is_alive()
        before = self._thinning
        takes, self._thinning = before.ask(number // every, is_busy)
        if self._thinning.stride > before.stride:
            log.warning(
                "ddp.elastic: commit %d is not written to %s: commit %d is still being written after %.0f s. Training "
                "continues; from now on, one of %d commits to this folder is written",
                *(number, self._folder.name, self._writing, time.monotonic() - self._began),
                self._thinning.stride,
            )
        return takes

    def write(self, slot: Slot, name: commits.DiskName, names: Names) -> None:
        """Write a slot to disk. The slot is not overwritten until the write has finished."""
        self.finish()
        slot.being_written = True
        self._written.clear()
        self._began, self._writing = time.monotonic(), name.commit.number
        thread = threading.Thread(target=self._run, args=(slot, name, names), name="ddp-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread: write in the foreground
            self._run(slot, name, names)
        else:
            self._thread = thread

    def finish(self) -> None:
        """Wait for the pending commit, and for the removal of old ones."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def flush(self, first: int = 0) -> None:
        """Wait for the pending commit, and raise the errors of commits with this number or a later one."""
        if self._folder.is_remote:
            self.finish()
        elif self._thread is not None:
            self._written.wait()
        self.raise_error(first)

    def leave(self) -> None:
        """Wait before the process ends, but not long for a store that does not answer."""
        if self._folder.is_remote and self._thread is not None:
            self._thread.join(_AT_EXIT_S)
            if self._thread.is_alive():
                log.error("ddp.elastic: commit %d did not reach %s", self._writing, self._folder.name)
        else:
            self.finish()
            self.raise_error()

    def raise_error(self, first: int = 0, before: int | None = None) -> None:
        """Raise an error if commits from `first` on have failed and were not reported yet."""
        if before is not None and self._folder.is_remote:
            return
        numbers = [n for n in list(self._failed) if first <= n and (before is None or n < before)]
        if numbers:
            error = [self._failed.pop(number) for number in numbers][-1]
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            which = ", ".join(map(str, numbers))
            what_next = (
                "Check the address, the permissions and the network"
                if self._folder.is_remote
                else "Free disk space, or use State(folder=...) on another disk"
            )
            raise CommitError(
                f"commit {which} could not be written to {self._folder.name}: {reason}. Training can continue. "
                f"{what_next}"
            ) from error

    def _run(self, slot: Slot, name: commits.DiskName, names: Names) -> None:
        number, is_there = name.commit.number, False
        try:
            source = image.Image(slot.buffer)
            self._folder.write(commits.file_name(name), lambda: self._encoder.encode(source, names))
            manifest.complete(self._folder, self._maker, name)
            is_there = True
            if self._folder.is_remote:
                self._failed.clear()  # a newer commit is there
        except Exception as error:
            self._failed[number] = error
            if self._folder.is_remote:
                log.warning(
                    "ddp.elastic: commit %d was not written to %s: %s. Training continues",
                    *(number, self._folder.name, error),
                )
        finally:
            slot.being_written = False
            self._written.set()
        if self._prunes and is_there:
            self._remove_old(name.commit)

    def _remove_old(self, newest: commits.CommitName) -> None:
        """Remove old commits. If that fails, the new one is there all the same, and the next one tries it again."""
        try:
            self._prune(newest)
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            if reason not in self._said:
                self._said.add(reason)
                log.warning(
                    "ddp.elastic: old commits in %s cannot be removed, so they take up space: %s. Training continues. "
                    "Check the permissions, or remove them by hand",
                    *(self._folder.name, reason),
                )

    def _prune(self, newest: commits.CommitName) -> None:
        files = list(self._folder.files())
        kept = commits.commits_to_keep(files, self._keep, self._lineage, self._since)
        for commit, parts in commits.without_manifest(files, kept).items():
            if commit != newest and commit not in self._not_completed:
                self._complete(commit, parts)
        if old := commits.files_to_remove(files, self._keep, self._lineage, self._since):
            for commit in kept:
                self._folder.settle(commits.folder_name(commit))
            self._folder.remove(old)
        if len(kept) == self._keep:
            self._folder.remove_empty(kept[-1])

    def _complete(self, commit: commits.CommitName, parts: int) -> None:
        """Add the manifest of an earlier commit. Whether it succeeds does not matter to the newest one."""
        try:
            manifest.complete_later(self._folder, self._maker, commit, parts)
        except Exception as error:
            self._not_completed.add(commit)
            log.warning(
                "ddp.elastic: commit %d in %s stays without a manifest, which other programs need: %s",
                *(commit.number, self._folder.name, error),
            )
