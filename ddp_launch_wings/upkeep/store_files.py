"""File stores as files: copied, written, read, checked and compacted, also while a service uses them.

SQLite's own backup copies a database at one instant, while others write to it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

from rendezvous.store.file import LockFile, prepare
from rendezvous.store.protocol import StoreContents, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
