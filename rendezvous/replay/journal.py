"""Writes journals: what the state machines of this process are given, in one background thread.

Theory of operation
-------------------
The event loop only puts values into a queue. They are frozen, so the thread can read them later. It waits a moment
before it takes a batch: after a failure, the loop has better uses for the processor. So the last moment before a
`kill -9` may be missing in a journal.

A file begins with a state, so it can be replayed alone. When it has reached the limit, it gets the name with `.1`, in
place of the one before, and the next file begins with the state at that moment.

A journal is a diagnostic aid. If the disk is full, or too slow for the events, the journal ends with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rendezvous.values.contracts import VERSION

if TYPE_CHECKING:
    from rendezvous.replay.records import Machine, Scribe
    from rendezvous.values.types import AgentId


LIMIT = 8 << 20  # bytes of a file
_PAUSE_S = 1.0
_MOST_WAITING = 100_000  # values
_FLUSHED = 128 << 10  # bytes before compression
_NAMES = 1000
_NAME_CHARS = 150
_LEVEL = 6
_END = None


class Journals:
    """The journals of this process, in one folder. `complain` is called in the thread.

    `limit`: bytes of a file. `space`: of all journals of services in the folder; 0: unlimited.
    """

    def __init__(self, folder: str, limit: int, complain: Callable[[str], None], space: int = 0) -> None:
        self.folder, self.limit = folder, limit
        self.room = JournalFolder(folder, space)
        self._complain = complain
        self._queue: SimpleQueue[tuple[Journal, Callable[[_File], None] | None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._is_discarded = False

    def open(self, name: str, machine: Callable[[], Machine]) -> Journal:
        """A journal in the file NAME. `machine` is called in the thread: it may import modules."""
        return Journal(self, _safe(name), machine)

    def put(self, journal: Journal, write: Callable[[_File], None] | None) -> None:
        """`write` is called with the file of the journal. None: the journal ends."""
        if self._is_discarded:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journals", daemon=True)
            self._thread.start()
        if self._queue.qsize() >= _MOST_WAITING:
            journal.fail("the disk is too slow for its events")
            return
        self._queue.put((journal, write))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, then end the thread."""
        if self._thread is not None:
            self._queue.put(_END)
            self._hurry.set()
            self._thread.join(timeout_s)

    def discard(self) -> None:
        """End the thread without writing: the files are not needed any more."""
        self._is_discarded = True
        self.close()

    def warn(self, text: str) -> None:
        if not self._is_discarded:
            self._complain(text)

    def remove(self, name: str) -> None:
        """Delete the files of this name, also those of earlier processes."""
        files = re.compile(re.escape(_safe(name)) + rf"(-\d+)?(\.1)?{re.escape(SUFFIX)}")
        with contextlib.suppress(OSError):
            for found in os.listdir(self.folder):
                if files.fullmatch(found):
                    os.unlink(os.path.join(self.folder, found))

    def _run(self) -> None:
        touched: dict[Journal, None] = {}
        known: dict[Journal, None] = {}
        is_idle = True
        while True:
            item = self._queue.get()
            if is_idle:  # also if all that it does then is to end journals: once, not for each of them
                self._hurry.wait(_PAUSE_S)
            is_idle = self._queue.empty()
            if item is not _END and not self._is_discarded:
                journal, write = item
                journal.carry_out(write)
                touched[journal] = known[journal] = None
                if write is None:
                    del touched[journal], known[journal]
            if is_idle or item is _END:
                for journal in touched:
                    journal.flush()
                touched.clear()
            if item is _END:
                for journal in known:
                    journal.carry_out(None)
                return


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+-]", "_", name)[:_NAME_CHARS]


def name_of(job_id: str) -> str:
    return f"{PREFIX}{job_id}"


def journal_of(journals: Journals, job_id: str) -> Journal:
    """The journal of the service about a job."""
    return journals.open(name_of(job_id), service_machine)


def service_machine() -> Machine:
    from rendezvous.machine import step
    from rendezvous.replay.records import Machine
    from rendezvous.rounds.admission import renew_leases, resume
    from rendezvous.values.events import Effect, Event
    from rendezvous.values.job_state import JobState

    return Machine("service", JobState, Event, Effect, step, resume, renew_leases)


class Journal:
    """Records what one state machine is given. Its methods return at once."""

    def __init__(self, journals: Journals, name: str, machine: Callable[[], Machine]) -> None:
        self._journals, self._name, self._machine = journals, name, machine
        self._file: _File | None = None
        self._has_failed = False
        self._key = os.urandom(32)
        self._first: Callable[[_File], None] | None = None

    # --- for the event loop ------------------------------------------------------------------------

    def started(self, state: Any, now: float) -> None:
        self._put(lambda file: file.start(state, now))

    def loaded(self, state: Any, now: float, effects: tuple[Any, ...], after: Any) -> None:
        """`state` as it was in the store, `after` as it is adapted to this process.

        A look at a job that has ended must not create a file, so this waits for the first event.
        """
        self._first = lambda file: file.write(file.scribe.load(state, now, effects), now, after)

    def heard(self, heartbeats: Mapping[AgentId, float]) -> None:
        beats = dict(heartbeats)
        self._put(lambda file: file.write(file.scribe.hear(beats)))

    def took(self, event: Any, now: float, effects: tuple[Any, ...], after: Any) -> None:
        self._put(lambda file: file.write(file.scribe.do(event, now, effects), now, after))

    def end(self) -> None:
        self._journals.put(self, None)

    def fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._journals.warn(
                f"the journal in {self._journals.folder} ends here: {why}. The job continues without it"
            )

    def _put(self, write: Callable[[_File], None]) -> None:
        if self._has_failed:
            return
        if self._first is not None:
            self._journals.put(self, self._first)
            self._first = None
        self._journals.put(self, write)

    # --- in the thread -------------------------------------------------------------------------------

    def carry_out(self, write: Callable[[_File], None] | None) -> None:
        with self._failing():
            if write is None:
                if self._file is not None:
                    self._file.close()
                self._file, self._has_failed = None, True
            elif not self._has_failed:
                if self._file is None:
                    self._file = _File(self._journals, self._name, self._machine(), self._key)
                write(self._file)

    def flush(self) -> None:
        with self._failing():
            if self._file is not None:
                self._file.flush()

    @contextlib.contextmanager
    def _failing(self) -> Any:
        """An error of the disk, or of this module, must not end the job."""
        try:
            yield
        except OSError as error:
            self._give_up(f"{error.filename or self._name}: {error.strerror}")
        except Exception as error:
            self._give_up(f"internal error: {error!r}")

    def _give_up(self, why: str) -> None:
        self.fail(why)
        if self._file is not None:
            self._file.abandon()
            self._file = None


class _File:
    def __init__(self, journals: Journals, name: str, machine: Machine, key: bytes) -> None:
        from rendezvous.replay.records import Hiding

        self._machine, self._limit, self._room = machine, journals.limit, journals.room
        self._hide = Hiding(key)
        self._room.takes(0)
        self._base, fd = _create(os.path.join(journals.folder, name))
        try:
            self._begin(fd)
        except OSError:
            self.abandon()
            raise

    def _begin(self, fd: int) -> None:
        from rendezvous.replay.records import MAGIC, Scribe

        self._file = open(fd, "wb", buffering=0)
        self._room.opens(self._path)
        self._packer = zlib.compressobj(_LEVEL)
        self._file.write(MAGIC)
        self._size, self._unflushed = len(MAGIC), 0
        self.scribe: Scribe = Scribe(self._machine, self._hide)
        self._add(self.scribe.header(VERSION, time.time()))

    def start(self, state: Any, now: float) -> None:
        self._add(self.scribe.start(state, now))

    def write(self, line: bytes, now: float = 0.0, after: Any = None) -> None:
        """`after`: the state with which a next file can begin; None: it cannot begin here."""
        self._add(line)
        if self._size >= self._limit and after is not None:
            self._turn_over(after, now)

    def _turn_over(self, state: Any, now: float) -> None:
        self.close()
        os.replace(self._path, f"{self._base}.1{SUFFIX}")
        self._begin(_new(self._path))
        self.start(state, now)

    def _add(self, line: bytes) -> None:
        self._unflushed += len(line)
        self._save(self._packer.compress(line + b"\n"))
        if self._unflushed > _FLUSHED:  # only then is it known how large the file is
            self.flush()

    def flush(self) -> None:
        self._unflushed = 0
        self._save(self._packer.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        self._save(self._packer.flush(zlib.Z_FINISH))
        self.abandon()

    def abandon(self) -> None:
        """Write nothing more. What is in the file is readable."""
        self._file.close()
        self._room.closes(self._path)

    @property
    def _path(self) -> str:
        return self._base + SUFFIX

    def _save(self, data: bytes) -> None:
        self._room.takes(len(data))
        self._size += len(data)
        while data:
            data = data[self._file.write(data) or 0 :]


def _new(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _create(base: str) -> tuple[str, int]:
    """A new file, whose name no earlier process has taken: return its path without the suffix, and a descriptor."""
    for number in range(1, _NAMES):
        chosen = base if number == 1 else f"{base}-{number}"
        with contextlib.suppress(FileExistsError):
            return chosen, _new(chosen + SUFFIX)
    raise OSError(errno.EEXIST, f"{_NAMES} journals with this name exist; remove some", base + SUFFIX)


# --- journal folder ---------------------------------------------------------------------------------
#
# Keeps the journals in the folder of a service within a size: those not written for the longest time are removed.
#
# The service removes the journal of a job together with the job. That is not enough if several replicas serve a job in
# turn: each has a part of its journal on its own disk, and only one of them removes the job.

PREFIX, SUFFIX = "journal_service_", ".ddpj"
_LOOK_AGAIN = 1 << 20  # bytes that are written before the folder is read again


class JournalFolder:
    """`space`: bytes of all journals together; 0: unlimited. Used in the thread of the journals only."""

    def __init__(self, path: str, space: int) -> None:
        self.path, self._space = path, space
        self._written: set[str] = set()  # files that are open now
        self._since_look = _LOOK_AGAIN

    def opens(self, path: str) -> None:
        self._written.add(path)

    def closes(self, path: str) -> None:
        self._written.discard(path)

    def takes(self, size: int) -> None:
        """So many bytes are written next. Raise OSError if there is no room for them."""
        self._since_look += size
        if self._space and self._since_look >= _LOOK_AGAIN:
            self._since_look = 0
            self._make_room()

    def _make_room(self) -> None:
        files = sorted(self._files())
        together = sum(size for _, _, size in files)
        for _, path, size in files:
            if together <= self._space:
                return
            if path not in self._written:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                together -= size
        if together > self._space:
            self._since_look = _LOOK_AGAIN  # the next one may not write either
            why = f"the journals of running jobs need more than {self._space >> 20} MiB (--journal-space)"
            raise OSError(errno.ENOSPC, why)

    def _files(self) -> Iterator[tuple[float, str, int]]:
        """When each was written last, where it is, and its size."""
        for entry in os.scandir(self.path):
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_mtime, entry.path, found.st_size
