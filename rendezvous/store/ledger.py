"""One SQLite database behind one thread, so that no disk ever holds up the event loop.

Operations run in the order in which they were asked for. Whatever has queued up while the last commit was
under way goes into the next one together, so a burst costs one wait for the disk, not one each; nobody
hears of his write before it is on the disk.

`synchronous=FULL`: with WAL the cheaper NORMAL would survive a crash of the process, but not a loss of power,
and agents act on what they are told. A disk that is full or failing makes everybody wait, and is logged once.
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
    """`prepare` runs first, on the open database: it makes the tables, or refuses what it finds."""

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
        """`operation` may run more than once; only its last run counts. What it raises comes out here."""
        if self._closing.is_set():
            raise StoreError(f"{self._path} is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._tasks.put(_Task(operation, answer))
        return await answer

    async def close(self) -> None:
        """What was asked for before is done first, unless the disk refuses."""
        if not self._closing.is_set():
            self._closing.set()
            self._tasks.put(None)
        await asyncio.shield(self._done)

    # --- in the thread

    def _run(self, prepare: Callable[[sqlite3.Connection], None]) -> None:
        try:
            database = self._open(prepare)
        except Exception as error:
            self._tell(_Outcome(self._ready, None, StoreError(f"{self._path}: {error}")))
        else:
            self._tell(_Outcome(self._ready, None, None))
            self._serve(database)
            database.close()
        self._tell(_Outcome(self._done, None, None))

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
                self._tell(*self._carry_out(database, batch))

    def _carry_out(self, database: sqlite3.Connection, batch: list[_Task]) -> list[_Outcome]:
        complained = False
        while True:
            try:
                outcomes = self._one_transaction(database, batch)
            except sqlite3.OperationalError as error:
                if self._closing.is_set():
                    return [_Outcome(t.answer, None, StoreError(f"{self._path}: {error}")) for t in batch]
                if not complained:
                    _log.error("%s: %s; waiting until it can be written again", self._path, error)
                complained = True
                self._closing.wait(_RETRY_S)
            except Exception as error:  # damage, or a fault of ours: nobody must wait for it for ever
                return [_Outcome(t.answer, None, StoreError(f"{self._path}: {error}")) for t in batch]
            else:
                if complained:
                    _log.warning("%s can be written again", self._path)
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
        except Exception as error:  # the operation's own verdict: it looked before it wrote
            return _Outcome(task.answer, None, error)

    def _tell(self, *outcomes: _Outcome) -> None:
        try:
            self._loop.call_soon_threadsafe(_deliver, outcomes)
        except RuntimeError:
            _log.debug("%s: nobody is left to hear of %d writes", self._path, len(outcomes))


def _deliver(outcomes: tuple[_Outcome, ...]) -> None:
    for answer, value, error in outcomes:
        if answer.done():
            continue  # who asked has been cancelled
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
