"""The folder of the commits on disk. A file with a final name is always complete and synced.

After a loss of power a disk has what was synced, and any part of the rest. A file and its name in a folder are synced
apart, and names that were not synced can come and go in any order. So each step that relies on another one waits until
that one is on the disk: the name until the data is, the manifest until all parts have their names, the removal of an
old commit until the newer ones are there, and the removal of its parts until its manifest is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from ddp.elastic import commits, scratch

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOGETHER = 1 << 20  # small buffers are written together
_BEGIN_EVERY = 8 << 20  # bytes, after which the disk is asked to begin with them
_MADV_POPULATE_READ = 22
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


Content = Callable[[], "Iterable[bytes | memoryview]"]  # called again if a write has to be repeated
Range = tuple[str, int, int]  # of a file: begin and length


class Folder(Protocol):
    """Files by their paths from the folder, which have at most one slash."""

    is_remote: ClassVar[bool]

    @property
    def name(self) -> str: ...
    def files(self, patience_s: float | None = None) -> dict[str, str]: ...
    def files_in(self, path: str) -> dict[str, int]: ...
    def read(self, file: str) -> memoryview: ...
    def read_ranges(self, wanted: list[Range]) -> list[bytes]: ...
    def write(self, file: str, content: Content, unfinished: str = ...) -> None: ...
    def settle(self, path: str) -> None: ...
    def remove(self, files: list[str]) -> None: ...
    def remove_empty(self, before: commits.CommitName) -> None: ...


class LocalFolder:
    """A folder in a file system."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._durable: set[Path] = set()  # folders whose names this process has synced

    @property
    def name(self) -> str:
        return str(self._path)

    def files(self, patience_s: float | None = None) -> dict[str, str]:
        """All files of commits, each with a text that differs if another file has the same name on another node."""
        found = {}
        for entry in _entries(self._path):
            if entry.is_file():
                found[entry.name] = entry
            elif commits.parse_folder_name(entry.name):
                found |= {f"{entry.name}/{inner.name}": inner for inner in _entries(Path(entry.path))}
        known = {file: entry for file, entry in found.items() if commits.commit_of(file) is not None}
        identities = {}
        for file, entry in known.items():
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat = entry.stat()
                identities[file] = f"{stat.st_ino:x}-{stat.st_size}-{stat.st_mtime_ns}"
        return identities

    def files_in(self, path: str) -> dict[str, int]:
        """The files of a commit, with their sizes."""
        found = {}
        for entry in _entries(self._path / path):
            with contextlib.suppress(FileNotFoundError):  # another rank has given its file the final name
                found[entry.name] = entry.stat().st_size
        return found

    def read(self, file: str) -> memoryview:
        mapped = scratch.map_for_reading(self._path / file)
        _load(mapped)
        return memoryview(mapped)

    def read_ranges(self, wanted: list[Range]) -> list[bytes]:
        found = []
        for file, at, n_bytes in wanted:
            with (self._path / file).open("rb") as opened:
                opened.seek(at)
                found.append(opened.read(n_bytes))
        return found

    def write(self, file: str, content: Content, unfinished: str = commits.UNFINISHED) -> None:
        """Write a file atomically."""
        path = self._path / file
        self._make(path.parent)
        temporary = path.with_name(path.name + unfinished)
        try:
            with open(temporary, "wb", buffering=0) as opened:
                _write_all(opened.fileno(), together(content()))
                os.fsync(opened.fileno())
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync(path.parent)

    def _make(self, path: Path) -> None:
        """Make the folder of a commit, so that it is there also after a loss of power."""
        missing = {each for each in (path, *path.parents) if not each.exists()}
        path.mkdir(parents=True, exist_ok=True)
        for each in (path, *path.parents[:-1]):
            if each not in self._durable:
                # One that is there may have been made by a process that was killed before it could sync the name.
                with contextlib.nullcontext() if each in missing else contextlib.suppress(PermissionError):
                    _sync(each.parent)
                self._durable.add(each)

    def settle(self, path: str) -> None:
        """Return when the names in the folder of a commit are on the disk, whichever rank has made them."""
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or of release 0.1.0
            _sync(self._path / path)

    def remove(self, files: list[str]) -> None:
        """Remove files; no part before the manifest of its commit."""
        manifests = [file for file in files if file.endswith(commits.MANIFEST)]
        for file in manifests:
            self._unlink(file)
        for file in manifests:
            self.settle(file.partition("/")[0])
        for file in files:
            self._unlink(file)
        for folder in {self._path / file.partition("/")[0] for file in files if "/" in file}:
            with contextlib.suppress(OSError):  # another rank has still a file there
                folder.rmdir()

    def remove_empty(self, before: commits.CommitName) -> None:
        """Remove the empty folders of older commits: a process was killed before it wrote its file there."""
        for entry in _entries(self._path):
            commit = commits.parse_folder_name(entry.name)
            if commit is not None and commit < before:
                with contextlib.suppress(OSError):  # not empty, or another rank was faster
                    os.rmdir(entry.path)

    def _unlink(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._path / file).unlink()


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _load(mapped: mmap.mmap) -> None:
    """Let the kernel read all of a mapped file now: what the disk cannot read is an error here, and a SIGBUS later."""
    try:
        mapped.madvise(_MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise OSError(errno.EIO, "the disk does not give all of it") from error


def _write_all(fd: int, buffers: Iterable[bytes | memoryview]) -> None:
    """Write to an empty file. The disk begins early, and not only when all is written and the file is synced."""
    written, begun = 0, 0
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            done = os.write(fd, rest)
            rest, written = rest[done:], written + done
        if written - begun >= _BEGIN_EVERY:
            whole = written - written % mmap.PAGESIZE  # the next buffer still changes the last page
            _begin_to_write(fd, begun, whole - begun)
            begun = whole


def _begin_to_write(fd: int, at: int, n_bytes: int) -> None:
    """Ask the kernel to write this range of a file to the disk now, and do not wait for it.

    It is only a hint: it makes nothing durable. So its errors do not count, and `fsync` finds those of the disk.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, at, n_bytes, _SYNC_FILE_RANGE_WRITE)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def together(buffers: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """Join small buffers: a state of many small tensors has thousands of them."""
    joined = bytearray()
    for buffer in buffers:
        if len(joined) + len(buffer) > _TOGETHER:
            if joined:
                yield bytes(joined)
                joined.clear()
            if len(buffer) > _TOGETHER // 2:
                yield buffer
                continue
        joined += buffer
    if joined:
        yield bytes(joined)
