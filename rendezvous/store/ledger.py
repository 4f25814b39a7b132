"""One SQLite database with its own thread, so that the disk never blocks the event loop.

Operations run in the order of their requests. Operations that were queued during a commit share the next commit, so a
burst needs one fsync. A write is reported as done only once it is on the disk.

`synchronous=FULL`: with WAL, the faster NORMAL would survive a crash of the process but not a power failure, and the
service informs agents after the commit. If the disk is full or fails, callers wait, and the error is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rendezvous.store.protocol import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Ledger:
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
