"""The store in one SQLite file, for one process; a restarted service resumes all jobs in it.

jobs           job -> version, packed state
bases          job -> the snapshot that the packed state of a large job refers to
script_values  job, key -> version, data
counter        the last version number used, shared by jobs and values: a number is never reused
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from rendezvous.store.protocol import (
    Conflict,
    JobStore,
    Notices,
    Ownership,
    Packer,
    SoleOwnership,
    StoreError,
    Value,
    Values,
    check_count,
    check_key,
    check_value,
)
from rendezvous.values.job_state import JobState

_LAYOUT = 1
_APPLICATION = 0x64647072
# Not in every file: releases before 0.2 know no bases, and neither create nor delete any. They refuse to read a state
# that refers to one.
_BASES = "CREATE TABLE IF NOT EXISTS bases (job TEXT PRIMARY KEY, state BLOB NOT NULL)"
_TABLES = (
    "CREATE TABLE jobs (job TEXT PRIMARY KEY, version INTEGER NOT NULL, state BLOB NOT NULL)",
    "CREATE TABLE script_values (job TEXT, key TEXT, version INTEGER NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (job, key))",
    "CREATE TABLE counter (last INTEGER NOT NULL)",
    "INSERT INTO counter VALUES (0)",
    f"PRAGMA application_id={_APPLICATION}",
    f"PRAGMA user_version={_LAYOUT}",
)


async def open_file_store(path: str, address: str = "") -> FileStore:
    lock = LockFile(f"{path}.lock")
    try:
        ledger = await _open_ledger(path)
    except BaseException:
        lock.release()
        raise
    return FileStore(ledger, lock, address)


async def _open_ledger(path: str) -> SqliteThread:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # tracebacks must be private
    except OSError as error:
        raise StoreError(
            f"cannot open the store {path} (--store): {error.strerror}. Check the path and its permissions"
        ) from error
    ledger = SqliteThread(path, prepare)
    try:
        await ledger.ready()
    except BaseException:
        await ledger.close()
        raise
    return ledger


class FileStore:
    def __init__(self, ledger: SqliteThread, lock: LockFile, address: str) -> None:
        self.ownership: Ownership = SoleOwnership(address)
        self._ledger, self._lock = ledger, lock
        self._notices: dict[str, Notices] = {}

    def job(self, job_id: str) -> JobStore:
        return FileJob(self._ledger, job_id)

    def values(self, job_id: str) -> Values:
        return FileValues(self._ledger, job_id, self._notices.setdefault(job_id, Notices()))

    async def jobs(self) -> dict[str, int]:
        rows = await self._ledger.do(
            lambda db: db.execute("SELECT job, version FROM jobs ORDER BY job").fetchall()
        )
        return dict(rows)

    async def delete(self, job_id: str) -> None:
        def both(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM jobs WHERE job = ?", (job_id,))
            db.execute("DELETE FROM bases WHERE job = ?", (job_id,))
            db.execute("DELETE FROM script_values WHERE job = ?", (job_id,))

        await self._ledger.do(both)
        self._notices.pop(job_id, None)

    async def close(self) -> None:
        await self._ledger.close()
        self._lock.release()


class FileJob:
    def __init__(self, ledger: SqliteThread, job_id: str) -> None:
        self._ledger, self._job_id = ledger, job_id
        self._packer = Packer()

    async def load(self) -> tuple[JobState, int]:
        def read(db: sqlite3.Connection) -> tuple[int, bytes, bytes] | None:
            query = (
                "SELECT version, jobs.state, bases.state FROM jobs LEFT JOIN bases USING (job) WHERE job = ?"
            )
            found = db.execute(query, (self._job_id,)).fetchone()
            return None if found is None else (found[0], found[1], found[2] or b"")

        row = await self._ledger.do(read)
        if row is None:
            return JobState(), 0
        version, value, base = row
        return await self._packer.unpack(value, base, self._job_id), version

    async def save(self, state: JobState, expected_version: int) -> int:
        packed = await self._packer.pack(state)

        def write(db: sqlite3.Connection) -> int:
            if _version(db, "SELECT version FROM jobs WHERE job = ?", self._job_id) != expected_version:
                raise Conflict
            version = _next_version(db)
            db.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", (self._job_id, version, packed.value))
            if packed.base:
                db.execute("INSERT OR REPLACE INTO bases VALUES (?, ?)", (self._job_id, packed.base))
            elif packed.base is not None:
                db.execute("DELETE FROM bases WHERE job = ?", (self._job_id,))
            return version

        version = await self._ledger.do(write)
        self._packer.stored(packed)
        return version


class FileValues:
    def __init__(self, ledger: SqliteThread, job_id: str, notices: Notices) -> None:
        self._ledger, self._job_id, self._notices = ledger, job_id, notices

    async def get(self, key: str) -> Value | None:
        def read(db: sqlite3.Connection) -> Value | None:
            query = "SELECT data, version FROM script_values WHERE job = ? AND key = ?"
            row = db.execute(query, (self._job_id, key)).fetchone()
            return None if row is None else Value(*row)

        return await self._ledger.do(read)

    async def put(self, key: str, data: bytes) -> int:
        return await self._put(key, data, None)

    async def compare_and_put(self, key: str, data: bytes, expected_version: int) -> int:
        return await self._put(key, data, expected_version)

    async def _put(self, key: str, data: bytes, expected_version: int | None) -> int:
        check_key(key)
        check_value(data)

        def write(db: sqlite3.Connection) -> int:
            query = "SELECT version FROM script_values WHERE job = ? AND key = ?"
            held = _version(db, query, self._job_id, key)
            if expected_version not in (None, held):
                raise Conflict
            if not held:
                check_count(_version(db, "SELECT count(*) FROM script_values WHERE job = ?", self._job_id))
            version = _next_version(db)
            row = (self._job_id, key, version, data)
            db.execute("INSERT OR REPLACE INTO script_values VALUES (?, ?, ?, ?)", row)
            return version

        version = await self._ledger.do(write)
        self._notices.announce(key)
        return version

    async def delete(self, key: str) -> bool:
        def remove(db: sqlite3.Connection) -> bool:
            query = "DELETE FROM script_values WHERE job = ? AND key = ?"
            return db.execute(query, (self._job_id, key)).rowcount > 0

        return await self._ledger.do(remove)

    async def wait(self, key: str, after_version: int = 0) -> Value:
        return await self._notices.wait(key, after_version, lambda: self.get(key))


def prepare(db: sqlite3.Connection) -> None:
    layout = db.execute("PRAGMA user_version").fetchone()[0]
    application = db.execute("PRAGMA application_id").fetchone()[0]
    empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if empty:
        db.execute("BEGIN")
        for statement in (*_TABLES, _BASES):
            db.execute(statement)
        db.execute("COMMIT")
    elif application != _APPLICATION:
        raise StoreError(
            "not a store of ddp-rendezvous, but a database of another program: choose another file"
        )
    elif layout != _LAYOUT:
        raise StoreError(
            f"this database has layout {layout}, and this version reads layout {_LAYOUT}: use the version that wrote it"
        )
    else:
        db.execute(_BASES)  # an older release made this file


def _version(db: sqlite3.Connection, query: str, *keys: str) -> int:
    row = db.execute(query, keys).fetchone()
    return 0 if row is None else int(row[0])


def _next_version(db: sqlite3.Connection) -> int:
    return int(db.execute("UPDATE counter SET last = last + 1 RETURNING last").fetchall()[0][0])


# --- one SQLite database with its own thread, so that the disk never blocks the event loop ----------
#
# Operations run in the order of their requests. Operations that were queued during a commit share the next commit, so a
# burst needs one fsync. A write is reported as done only once it is on the disk.
#
# `synchronous=FULL`: with WAL, the faster NORMAL would survive a crash of the process but not a power failure, and the
# service informs agents after the commit. If the disk is full or fails, callers wait, and the error is logged once.

T = TypeVar("T")

_log = logging.getLogger(__name__)
_BATCH = 256
_RETRY_S = 0.5
_SETTINGS = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA busy_timeout=2000")


class _Task(NamedTuple):
    operation: Callable[[sqlite3.Connection], Any]
    answer: asyncio.Future[Any]


class _Outcome(NamedTuple):
    answer: asyncio.Future[Any]
    value: Any
    error: Exception | None


class SqliteThread:
    """`prepare` runs first: it creates the tables, or raises if the file is not usable."""

    def __init__(self, path: str, prepare: Callable[[sqlite3.Connection], None]) -> None:
        self._path = path
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="file store", daemon=True)
        self._thread.start()

    async def ready(self) -> None:
        await self._ready

    async def do(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run `operation` in a transaction, and raise its errors. If it runs more than once, the last run counts."""
        if self._closing.is_set():
            raise StoreError(f"the store {self._path} is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._tasks.put(_Task(operation, answer))
        return await answer

    async def close(self) -> None:
        """Close after all queued operations, unless the disk fails."""
        if not self._closing.is_set():
            self._closing.set()
            self._tasks.put(None)
        await asyncio.shield(self._done)

    # --- in the thread

    def _run(self, prepare: Callable[[sqlite3.Connection], None]) -> None:
        try:
            database = self._open(prepare)
        except Exception as error:
            self._report(_Outcome(self._ready, None, StoreError(f"{self._path}: {error}")))
        else:
            self._report(_Outcome(self._ready, None, None))
            self._serve(database)
            database.close()
        self._report(_Outcome(self._done, None, None))

    def _open(self, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            prepare(database)
            for setting in _SETTINGS:
                database.execute(setting).fetchall()
        except BaseException:
            database.close()
            raise
        return database

    def _serve(self, database: sqlite3.Connection) -> None:
        ended = False
        while not ended:
            batch: list[_Task] = []
            task = self._tasks.get()
            while task is not None:
                batch.append(task)
                if len(batch) == _BATCH or self._tasks.empty():
                    break
                task = self._tasks.get()
            ended = task is None
            if batch:
                self._report(*self._carry_out(database, batch))

    def _carry_out(self, database: sqlite3.Connection, batch: list[_Task]) -> list[_Outcome]:
        has_logged = False
        while True:
            try:
                outcomes = self._one_transaction(database, batch)
            except sqlite3.OperationalError as error:
                if self._closing.is_set():
                    return [_Outcome(t.answer, None, StoreError(f"{self._path}: {error}")) for t in batch]
                if not has_logged:
                    _log.error(
                        "cannot write the store %s: %s. Free disk space or correct the permissions; retrying",
                        self._path,
                        error,
                    )
                has_logged = True
                self._closing.wait(_RETRY_S)
            except Exception as error:  # a damaged file or a bug: callers must not wait for ever
                return [_Outcome(t.answer, None, StoreError(f"{self._path}: {error}")) for t in batch]
            else:
                if has_logged:
                    _log.warning("the store %s is writable again", self._path)
                return outcomes

    def _one_transaction(self, database: sqlite3.Connection, batch: list[_Task]) -> list[_Outcome]:
        database.execute("BEGIN")
        try:
            outcomes = [self._outcome(database, task) for task in batch]
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return outcomes

    def _outcome(self, database: sqlite3.Connection, task: _Task) -> _Outcome:
        try:
            return _Outcome(task.answer, task.operation(database), None)
        except sqlite3.Error:
            raise
        except Exception as error:  # raised by the operation itself, before it wrote
            return _Outcome(task.answer, None, error)

    def _report(self, *outcomes: _Outcome) -> None:
        try:
            self._loop.call_soon_threadsafe(_deliver, outcomes)
        except RuntimeError:
            _log.debug(
                "%s: the event loop is closed; the results of %d writes are not reported",
                self._path,
                len(outcomes),
            )


def _deliver(outcomes: tuple[_Outcome, ...]) -> None:
    for answer, value, error in outcomes:
        if answer.done():
            continue  # the caller was cancelled
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)


# --- lock file --------------------------------------------------------------------------------------
#
# One process per file store. The kernel releases the lock when the process ends, also after a crash.


class LockFile:
    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the lock file {path} of the store (--store): {error.strerror}. "
                "Check the permissions of its directory"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise StoreError(
                f"{path} is locked by process {holder or '?'}: only one process can use a file store."
                " Stop that process or use another file; several replicas need etcd."
            ) from error
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
