"""The folder of the commits: on disk, or in an object store."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from ddp.elastic import commits
from ddp.elastic.images import kept_images
from ddp.telemetry.coded import WrongValue

# --- on disk ---------------------------------------------------------------------------------------
#
# The folder of the commits on disk. A file with a final name is always complete and synced.
#
# After a loss of power a disk has what was synced, and any part of the rest. A file and its name in a folder are
# synced apart, and names that were not synced can come and go in any order. So each step that relies on another one
# waits until that one is on the disk: the name until the data is, the manifest until all parts have their names,
# the removal of an old commit until the newer ones are there, and the removal of its parts until its manifest is
# gone.

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
        mapped = kept_images.map_for_reading(self._path / file)
        # Let the kernel read all of a mapped file now: what the disk cannot read is an error here, and a SIGBUS later.
        try:
            mapped.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.14
                raise OSError(errno.EIO, "the disk does not give all of it") from error
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


# --- in an object store, through fsspec ------------------------------------------------------------
#
# The folder of the commits in an object store, through fsspec: `s3://bucket/path` and other URLs.
#
# An object appears when all of it has arrived, so it needs no unfinished name. A store can be slow or away for a
# while: each call is repeated, with growing pauses, until `PATIENCE_S` are over. Only the background thread waits
# for that.
#
# A store can also say what is not true: that an object is not there which was just uploaded, a listing or a size from
# before, less of an object than was asked for. So an answer that contradicts what is known is asked for again.
#
# Listings and objects cost time and money. So rank 0 alone lists the folder, and each object is read by one rank,
# which sends it to the others that need it (`ddp.elastic.resume`).

T = TypeVar("T")
log = logging.getLogger("ddp.elastic")

PATIENCE_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STALE_S = 30.0  # the time that a store has to show an object that it has taken
_LISTINGS = 3
_PIECE = 32 << 20  # of an object, which is read or written by several requests
_AT_ONCE = 8
# Repeating does not help against these; all others may be the network or the store.
# Of botocore: the configuration is wrong. But credentials can also be late when a machine starts.
_NEEDS_A_PERSON = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ImportError)


def open_folder(folder: str | os.PathLike[str], patience_s: float | None = None) -> Folder:
    """The folder at a path or URL. `file:` is a folder like any other. `patience_s`: with a store that is away."""
    protocol, is_url, rest = os.fspath(folder).partition("://")
    if not is_url:
        return LocalFolder(Path(folder).absolute())
    return (
        LocalFolder(Path(rest))
        if protocol in ("file", "local")
        else RemoteFolder(os.fspath(folder), patience_s)
    )


class RemoteFolder:
    """A folder at a URL that fsspec understands."""

    is_remote: ClassVar[bool] = True

    def __init__(self, url: str, patience_s: float | None = None) -> None:
        self._url, self._patience_s = url.rstrip("/"), patience_s
        self._fs, self._root = _opened(self._url)

    @property
    def name(self) -> str:
        return self._url

    def files(self, patience_s: float | None = None) -> dict[str, str]:
        pause_s = _FIRST_PAUSE_S
        for n_listed in range(1, _LISTINGS + 1):
            found = self._persist(lambda: self._find(self._root), "list", patience_s)
            files = {path[len(self._root) + 1 :]: str(size) for path, size in found.items()}
            ours = {file: size for file, size in files.items() if commits.commit_of(file) is not None}
            if n_listed == _LISTINGS or not commits.has_torn(ours):
                break
            time.sleep(pause_s)
            pause_s *= 2
        return ours

    def files_in(self, path: str) -> dict[str, int]:
        where = f"{self._root}/{path}"
        found = self._persist(lambda: self._find(where), f"list {path}", missing_s=_STALE_S)
        return {each[len(where) + 1 :]: size for each, size in found.items()}

    def _find(self, path: str) -> dict[str, int]:
        self._fs.invalidate_cache()  # other ranks write there as well
        found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
        return {name: int(facts.get("size") or 0) for name, facts in found.items()}

    def read(self, file: str) -> memoryview:
        """Read an object by several requests at the same time."""
        n_bytes = self._persist(lambda: self._size(file), f"read {file}", missing_s=_STALE_S)
        buffer = bytearray()
        for begin in range(0, n_bytes, _PIECE * _AT_ONCE):
            starts = range(begin, min(n_bytes, begin + _PIECE * _AT_ONCE), _PIECE)
            for piece in self.read_ranges([(file, at, min(n_bytes - at, _PIECE)) for at in starts]):
                buffer += piece
        return memoryview(buffer)

    def _size(self, file: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.info(self._path(file))["size"])

    def read_ranges(self, wanted: list[Range]) -> list[bytes]:
        paths = [self._path(file) for file, _at, _n_bytes in wanted]
        starts = [at for _file, at, _n_bytes in wanted]
        ends = [at + n_bytes for _file, at, n_bytes in wanted]

        def attempt() -> list[bytes]:
            found = [bytes(each) for each in self._fs.cat_ranges(paths, starts, ends, on_error="raise")]
            for (file, at, n_bytes), data in zip(wanted, found, strict=True):
                if len(data) != n_bytes:
                    raise OSError(f"the store sent {len(data)} of {n_bytes} bytes at {at} of {file}")
            return found

        return self._persist(attempt, f"read {wanted[0][0]}", missing_s=_STALE_S)

    def write(self, file: str, content: Content, unfinished: str = "") -> None:
        """Write an object."""

        def attempt() -> None:
            written = _upload(self._fs, self._path(file), content())
            if (stored := self._size_when_seen(file)) != written:
                raise OSError(f"the store has {stored} of {written} bytes")

        self._persist(attempt, f"write {file}")

    def _size_when_seen(self, file: str) -> int:
        """The size of an object that was just uploaded, which a store can be slow to show."""
        try:
            return self._persist(lambda: self._size(file), f"find {file}", _STALE_S, missing_s=_STALE_S)
        except FileNotFoundError as error:  # not lasting: it is uploaded again
            raise OSError("the store took all of it, but does not have it") from error

    def settle(self, path: str) -> None:
        """An object that can be listed is there to stay."""

    def remove(self, files: list[str]) -> None:
        """Remove objects, manifests before all others."""
        manifests = [file for file in files if file.endswith(commits.MANIFEST)]
        for group in (manifests, [file for file in files if file not in manifests]):
            if group:
                self._persist(partial(self._remove, list(map(self._path, group))), "remove commits")

    def remove_empty(self, before: commits.CommitName) -> None:
        """A store has no folders, so none is left without objects."""

    def _remove(self, paths: list[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            self._fs.rm(paths)

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    def _persist(
        self, action: Callable[[], T], what: str, patience_s: float | None = None, missing_s: float = 0.0
    ) -> T:
        """Repeat an action until it succeeds, or there is no hope. `missing_s`: likewise if the object is not found."""
        began = time.monotonic()
        give_up_at = began + next(
            each for each in (patience_s, self._patience_s, PATIENCE_S) if each is not None
        )
        pause_s, n_failed = _FIRST_PAUSE_S, 0
        while True:
            try:
                result = action()
            except _LASTING as error:
                is_missing = isinstance(error, FileNotFoundError)
                if not is_missing or time.monotonic() + pause_s > began + missing_s:
                    raise
                n_failed += 1
                self._warn(n_failed, what, error)
            except Exception as error:
                n_failed += 1
                needs_a_person = type(error).__name__ in _NEEDS_A_PERSON
                if time.monotonic() + pause_s > (
                    min(give_up_at, began + _STALE_S) if needs_a_person else give_up_at
                ):
                    raise OSError(f"{type(error).__name__}: {error}") from error
                self._warn(n_failed, what, error)
            else:
                if n_failed:
                    log.warning("ddp.elastic: %s is available again after %d failures", self._url, n_failed)
                return result
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _warn(self, n_failed: int, what: str, error: Exception) -> None:
        if n_failed in (1, 5, 10, 20):
            log.warning("ddp.elastic: cannot %s in %s, trying again: %r", what, self._url, error)


def _opened(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        fs, root = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        what = "ddp-launch[s3]" if protocol == "s3" else f"fsspec and its package for {protocol}"
        raise ImportError(
            f"cannot use folder={url!r}: {error}. Install {what}, or use a local folder"
        ) from error
    except ValueError as error:
        raise WrongValue(
            f"invalid folder={url!r}: {error}. Use a path, or a URL that fsspec knows, for example s3://bucket/path"
        ) from error
    return fs, str(root).rstrip("/")


def _upload(fs: Any, path: str, buffers: Iterable[bytes | memoryview]) -> int:
    """Upload an object in parts; return its size. After an error nothing of it may appear."""
    n_bytes = 0
    file = fs.open(path, "wb", block_size=_PIECE)
    try:
        for buffer in together(buffers):
            n_bytes += file.write(buffer)
    except BaseException:
        # Closing would finish the upload with what has been sent so far.
        file.closed = True
        file.discard()
        raise
    file.close()
    return n_bytes
