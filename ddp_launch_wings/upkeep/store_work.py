"""What backup, restore and compact do. A backup is a file store: `--store file:BACKUP` serves it, too.

So a backup of one kind of store can be restored into the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import _ddp_launch_entry as doors
from rendezvous.store.file import LockFile, prepare
from rendezvous.store.open import BadUrl
from rendezvous.store.protocol import StoreContents, StoreError
from rendezvous.values.error_codes import Code, with_code

# File stores as files: copied, written, read, checked and compacted, also while a service uses them.
#
# SQLite's own backup copies a database at one instant, while others write to it.

_BUSY_S = 60.0


@contextlib.contextmanager
def _opened(path: str, *, new: bool = False) -> Iterator[sqlite3.Connection]:
    """Only what is a store of ours, or will be one."""
    if new:
        if os.path.exists(path) and os.path.getsize(path):
            raise StoreError(f"{path} exists: nothing was written. Use a new file")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    elif not os.path.isfile(path):
        raise StoreError(f"{path} does not exist. Check the path")
    database = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)
    try:
        if not new:
            prepare(database)
        yield database
    finally:
        database.close()


def copy(source: str, target: str) -> None:
    """Raises `StoreError`, `sqlite3.Error`, `OSError`. What could not be written whole is removed."""
    with _opened(source) as old:
        _check(old, source)
        with _whole(target), _opened(target, new=True) as new:
            old.backup(new)


def write(target: str, contents: StoreContents) -> None:
    with _whole(target), _opened(target, new=True) as new:
        prepare(new)
        new.execute("BEGIN")
        new.execute("UPDATE counter SET last = ?", (contents.last,))
        new.executemany("INSERT INTO jobs VALUES (?, ?, ?)", contents.jobs)
        new.executemany("INSERT INTO bases VALUES (?, ?)", contents.bases)
        new.executemany("INSERT INTO script_values VALUES (?, ?, ?, ?)", contents.values)
        new.execute("COMMIT")


@contextlib.contextmanager
def _whole(target: str) -> Iterator[None]:
    existed = os.path.exists(target) and os.path.getsize(target) > 0
    try:
        yield
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):
                os.unlink(target)
        raise


def read(source: str) -> StoreContents:
    with _opened(source) as database:
        database.execute("BEGIN")
        return StoreContents(
            database.execute("SELECT last FROM counter").fetchone()[0],
            database.execute("SELECT job, version, state FROM jobs ORDER BY job").fetchall(),
            database.execute("SELECT job, state FROM bases ORDER BY job").fetchall(),
            database.execute(
                "SELECT job, key, version, data FROM script_values ORDER BY job, key"
            ).fetchall(),
        )


def examine(source: str) -> tuple[int, int]:
    """The number of its jobs, and its size. Raises `StoreError`, `sqlite3.Error` if it is damaged."""
    with _opened(source) as database:
        _check(database, source)
        jobs = database.execute("SELECT count(*) FROM jobs").fetchone()[0]
    return int(jobs), size_of(source)


def _check(database: sqlite3.Connection, path: str) -> None:
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StoreError(f"{path} is damaged: {found}. Restore a backup: `ddp-rendezvous restore`")


def compact(path: str) -> tuple[int, int]:
    """The size before and after. A service that uses the file waits meanwhile."""
    before = size_of(path)
    with _opened(path) as database:
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return before, size_of(path)


def size_of(path: str) -> int:
    return sum(os.path.getsize(each) for each in (path, f"{path}-wal") if os.path.exists(each))


@contextlib.contextmanager
def stopped(path: str) -> Iterator[None]:
    """While no service uses the file. Raises `StoreError`."""
    lock = LockFile(f"{path}.lock")
    try:
        yield
    finally:
        lock.release()


_FAILED = 1
_WITHIN_S = 300.0
_CONTINUE = (
    "Start the service: running jobs whose decisions are in the backup continue. Jobs that have restarted since then "
    "restart once more, and jobs that started since then are found again by their agents"
)


def carry_out(name: str, url: str, path: str) -> tuple[str, int]:
    """What to print, and the exit code."""
    try:
        return _WORK[name](store_of(url), path), 0
    except (StoreError, OSError, sqlite3.Error, doors.WingMissing, TimeoutError) as error:
        code = getattr(error, "code", Code.STORE_UNUSABLE)
        return f"ddp-rendezvous: {with_code(_words(error), code)}", _FAILED


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"the store did not answer within {_WITHIN_S:.0f} s. Check it with `ddp-rendezvous doctor`"
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.filename}: {error.strerror}. Check the path, its permissions and the space of the disk"
        )
    return str(error)


@dataclass(frozen=True)
class LookedAfter:
    """A file, or a store of a wing, such as etcd."""

    rest: str
    wing: Any = None

    def call(self, name: str, *words: object) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(_WITHIN_S):
                return await getattr(self.wing, name)(self.rest, os.environ, *words)

        return asyncio.run(within())


def store_of(url: str) -> LookedAfter:
    scheme, _, rest = url.partition(":")
    if scheme == "file" and rest:
        return LookedAfter(rest.removeprefix("//"))
    if rest.startswith("//") and (wing := doors.find(doors.STORE_UPKEEP, scheme)) is not None:
        return LookedAfter(rest[2:], wing)
    if url == "memory" or not url:
        raise BadUrl(
            "--store is missing: a store in memory cannot be looked after. Use the --store of the service"
        )
    raise BadUrl(f"unknown store {url.partition('?')[0]}: use file:PATH or etcd://HOST:PORT/PREFIX")


def _backup(store: LookedAfter, path: str) -> str:
    if store.wing is None:
        copy(store.rest, path)
    else:
        contents = store.call("dump")
        write(path, contents)
    jobs, size = examine(path)
    return f"wrote {path}: {jobs} jobs, {size:,} bytes. It can be restored with `ddp-rendezvous restore`"


def _restore(store: LookedAfter, path: str) -> str:
    jobs, _ = examine(path)
    if store.wing is None:
        with stopped(store.rest):
            copy(path, store.rest)
    else:
        store.call("fill", read(path))
    return f"restored {jobs} jobs. {_CONTINUE}"


def _compact(store: LookedAfter, _: str) -> str:
    before, after = compact(store.rest) if store.wing is None else store.call("compact")
    return f"compacted: {before:,} bytes before, {after:,} bytes now"


_WORK = {"backup": _backup, "restore": _restore, "compact": _compact}
