"""Imports modules on trial, in a process of its own, and finds what a fork would not have, or would share.

A module that passes behaves in a rank that is forked after its import as if the rank had imported it:

- It leaves nothing that a fork loses or shares: threads, open files, signal handlers, the state of a GPU.
- It does not keep what differs between processes: its pid, a random seed, the time.
- It reads no variable whose value is not settled: RANK and the like, or one that the script has changed since.
- It writes nothing to standard output or error, which the next ranks would no longer write.
- It imports the same files as in the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import import_records
from .import_recorder import ImportRecorder
from .import_records import Verdict
from .learner import attempt, under

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .import_records import Candidate, Record

_RECORD_BYTES = 1 << 20
# The launcher lets our library read it again in each rank (`tracing`).
_READ_AGAIN = {"DDP_JOINS"}
_SIGNALS = sorted(signal.valid_signals())


class Trial(NamedTuple):
    candidates: Sequence[Candidate]
    records: Sequence[Record]  # of all ranks
    stdlib: str
    of_each_rank: frozenset[str]  # variables that the launcher sets to different values in each rank

    def run(self, report: int) -> NoReturn:
        """Write a verdict for each module. End at the first that may not be imported: it has changed this process."""
        notes = _Notes()
        notes.watch()
        gc.disable()  # it takes a third of the time, and this process ends soon
        for candidate in self.candidates:
            is_there = candidate.name in sys.modules  # another one has imported it
            verdict = Verdict(candidate.name, "") if is_there else self._tried(candidate, notes)
            os.write(report, json.dumps(verdict).encode() + b"\n")
            if verdict.reason:
                break
        os._exit(0)

    def _tried(self, candidate: Candidate, notes: _Notes) -> Verdict:
        tried = ImportRecorder(bytearray(_RECORD_BYTES))
        tried.install()
        before = _State.now()
        with _output_kept() as has_written, under(candidate.variables):
            variables = _variables()
            notes.clear()
            error = attempt(candidate.name)
            read, noted = set(notes.read), notes.reason
            after = _variables()
        tried.uninstall()
        overwritten = [name for name, value in variables.items() if after.get(name) != value]
        added = {name: value for name, value in after.items() if name not in variables}
        reason = (
            error
            or ("it writes to standard output or error" if has_written() else "")
            or (f"it changes the variable {overwritten[0]}" if overwritten else "")
            or before.difference(_State.now())
            or (noted if candidate.name not in import_records.RESEEDED else "")
            or self._reads_unsettled(candidate, read - added.keys())
            or self._set_otherwise(added)
            or self._imported_otherwise(tried)
        )
        return Verdict(candidate.name, reason)

    def _reads_unsettled(self, candidate: Candidate, read: set[str]) -> str:
        name = min(read & (self.of_each_rank | candidate.unsettled) - _READ_AGAIN, default="")
        return name and f"it reads the variable {name}"

    def _set_otherwise(self, added: dict[str, str]) -> str:
        for name, value in added.items():
            if any(each.last.get(name, value) != value for each in self.records):
                return f"it sets the variable {name} to another value in the ranks"
        return ""

    def _imported_otherwise(self, tried: ImportRecorder) -> str:
        tried.finish()
        return import_records.difference(import_records.parse(tried.text()), self.records, self.stdlib)


@contextlib.contextmanager
def _output_kept() -> Iterator[Callable[[], bool]]:
    """Redirect standard output and error, also of native code; yield whether anything was written."""
    with tempfile.TemporaryFile() as kept:
        saved = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(kept.fileno(), fd)
        written = [False]
        try:
            yield lambda: written[0]
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            written[0] = os.fstat(kept.fileno()).st_size > 0
            for fd, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, fd)
                os.close(copy)


def _variables() -> dict[str, str]:
    """Return the variables without the mapping, which notes who reads it."""
    raw: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return {os.fsdecode(name): os.fsdecode(value) for name, value in raw.items()}


class _State(NamedTuple):
    """What a fork does not have, or shares with others."""

    threads: list[str]
    files: dict[str, str]
    handlers: list[Any]
    search_path: list[str]
    folder: str
    random: dict[str, Any]  # by module
    uses_gpu: bool

    @classmethod
    def now(cls) -> _State:
        return cls(
            sorted(os.listdir("/proc/self/task")),
            _open_files(),
            [signal.getsignal(each) for each in _SIGNALS],
            list(sys.path),
            os.getcwd(),
            _random_states(),
            _uses_gpu(),
        )

    def difference(self, after: _State) -> str:
        reasons = {
            "threads": "it starts a thread",
            "files": "it leaves a file or socket open",
            "handlers": "it sets a signal handler",
            "search_path": "it changes sys.path",
            "folder": "it changes the current folder",
            "uses_gpu": "it uses a GPU",
        }
        for field, text in reasons.items():
            if getattr(self, field) != getattr(after, field):
                return text
        used = any(after.random[each] != state for each, state in self.random.items())
        return "it uses random numbers" if used else ""


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the folder
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: where for fd, where in found.items() if not where.startswith("/proc/")}


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        states["numpy"] = str(numpy_random.get_state())
    if torch is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().tolist()
    return states


def _uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_initialized())


class _Notes:
    """What an import reads: variables, and facts that differ between processes."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.reason = ""

    def clear(self) -> None:
        self.read, self.reason = set(), ""

    def watch(self) -> None:
        """Replace functions for the rest of this process, which ends after the trial."""
        mapping: Any = type(os.environ)
        get, names = mapping.__getitem__, mapping.__iter__

        def getitem(environ: Any, key: Any) -> Any:
            self.read.add(os.fsdecode(key))
            return get(environ, key)

        def iterate(environ: Any) -> Any:
            self.reason = self.reason or "it reads all environment variables"
            return names(environ)

        mapping.__getitem__, mapping.__iter__ = getitem, iterate
        for owner, name, words in _DIFFERS_BETWEEN_PROCESSES:
            self._note_calls(owner, name, words)
        sys.modules["__main__"].__class__ = self._main_class()

    def _note_calls(self, owner: Any, name: str, words: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if _who_asks() not in _MAY_ASK:
                self.reason = self.reason or f"it reads {words}"
            return original(*args, **kwargs)

        setattr(owner, name, noting)

    def _main_class(self) -> type:
        """Return a class for `__main__` that notes what is missing: the zygote has no script yet."""
        notes = self

        class Main(type(sys)):  # type: ignore[misc]
            def __getattr__(self, name: str) -> Any:
                if _who_asks() not in _MAY_LOOK:
                    notes.reason = notes.reason or f"it looks at the script ({name})"
                raise AttributeError(f"module '__main__' has no attribute '{name}'")

        return Main


def _who_asks() -> str:
    """Return the package whose code calls the function that is watched, without the modules that only pass it on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (
        "uuid",
        "random",
        "secrets",
        __name__,
    ):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_MAY_LOOK = ("inspect", "linecache")  # at all modules, to find the file of a function
_MAY_ASK = ("torch", "tempfile")  # torch makes names for one process; tempfile asks again in each process
_DIFFERS_BETWEEN_PROCESSES: tuple[tuple[Any, str, str], ...] = (
    (os, "getpid", "its process number"),
    (os, "urandom", "random bytes"),
    (uuid, "uuid1", "a random number"),
    (uuid, "uuid4", "a random number"),
    (random.SystemRandom, "getrandbits", "a random number"),
    (time, "time", "the time"),
    (threading, "get_native_id", "its thread number"),
)
