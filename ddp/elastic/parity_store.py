"""The parity chunks that this rank keeps in memory for other nodes.

Each chunk has two files: one with the chunk of the last protected commit, the other one for the next commit. The files
have the lineage in their names. So those of an earlier generation stay until a commit of this one is protected.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp.elastic import parity_file, scratch

if TYPE_CHECKING:
    from pathlib import Path

Key = tuple[int, int]  # stripe and row


@dataclass(slots=True)
class _File:
    path: Path
    buffer: memoryview
    number: int | None = None  # of the commit


class ParityStore:
    def __init__(self, places: list[Path], lineage: str) -> None:
        self._places, self._lineage = places, lineage
        self._files: dict[Key, list[_File]] = {}
        self._lock = threading.Lock()

    def open(self, key: Key, number: int, n_chunks: int, n_bytes: int) -> memoryview:
        """Begin the chunk of a commit. Return its data, to be written."""
        at = parity_file.data_at(n_chunks)
        with self._lock:
            found = self._file(key, number, at + n_bytes)
        parity_file.begin(found.buffer)
        return found.buffer[at : at + n_bytes]

    def _file(self, key: Key, number: int, n_bytes: int) -> _File:
        files = self._files.setdefault(key, [])
        free = next((each for each in files if each.number in (None, number)), None)
        if free is not None and len(free.buffer) < n_bytes:
            files.remove(free)
            self._unlink(free.path)
            free = None
        if free is None:
            taken = {each.path.name for each in files}
            stem = f"parity-{self._lineage}-{key[0]}-{key[1]}"
            name = next(name for turn in range(3) if (name := f"{stem}-{turn}") not in taken)
            free = _File(*scratch.new_file(self._places, name, n_bytes))
            files.append(free)
        free.number = number
        return free

    def data(self, key: Key, number: int, begin: int, n_bytes: int, n_chunks: int) -> memoryview:
        """A part of a chunk that was begun."""
        found = self._of(key, number)
        at = parity_file.data_at(n_chunks) + begin
        if begin < 0 or at + n_bytes > len(found.buffer):
            raise OSError(f"parity chunk {key} ends before {begin + n_bytes}")
        return found.buffer[at : at + n_bytes]

    def finish(self, key: Key, number: int, facts: dict[str, Any], n_bytes: int) -> None:
        parity_file.finish(self._of(key, number).buffer, facts, n_bytes)

    def _of(self, key: Key, number: int) -> _File:
        with self._lock:
            for each in self._files.get(key, ()):
                if each.number == number:
                    return each
        raise OSError(f"parity chunk {key} of commit {number} was not begun")

    def keep_only(self, number: int) -> None:
        """Forget all chunks but those of this commit, also those of earlier generations."""
        with self._lock:
            for files in self._files.values():
                for each in files:
                    if each.number not in (None, number):
                        parity_file.begin(each.buffer)
                        each.number = None
        for path in scratch.parities_in(self._places):
            if not path.name.startswith(f"parity-{self._lineage}-"):
                self._unlink(path)

    def remove(self) -> None:
        with self._lock:
            files = [each for kept in self._files.values() for each in kept]
            self._files.clear()
        for each in files:
            self._unlink(each.path)

    @staticmethod
    def _unlink(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
