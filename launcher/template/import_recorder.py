"""Records what a rank imports, so that the zygote can import the same before it forks the next ranks.

`PathFinder` is asked for each module that is not loaded yet and not built in, so its `find_spec` is wrapped. A finder
of our own would be visible to the script, in `sys.meta_path`. The recorder writes to memory that it shares with the
zygote (`import_records` describes the lines): this costs a microsecond, needs no file, and is complete when the rank is
killed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmap import mmap

_CODE_RUNS = "_initializing"  # importlib sets this attribute of a spec while the code of the module runs
_getpid = os.getpid  # a trial import watches who calls os.getpid


class ImportRecorder:
    def __init__(self, shared: mmap | bytearray) -> None:
        self._shared, self._end = shared, 0
        self._pid = _getpid()
        self._first = dict(os.environ._data)  # type: ignore[attr-defined]  # compared in C: the mapping takes longer
        self._last = self._first
        self._unfinished: list[str] = []  # modules of which the file is not known yet
        self._in_progress: list[str] = []  # modules whose code runs, the outermost first
        self._lock = threading.Lock()

    def install(self) -> None:
        find = self._find = vars(PathFinder)["find_spec"]

        @functools.wraps(find.__func__)
        def find_spec(finder: Any, fullname: str, path: Any = None, target: Any = None) -> Any:
            self._record(fullname)
            return find.__func__(finder, fullname, path, target)

        PathFinder.find_spec = classmethod(find_spec)  # type: ignore[method-assign, assignment]

    def uninstall(self) -> None:
        PathFinder.find_spec = self._find  # type: ignore[method-assign]

    def _record(self, name: str) -> None:
        """Record the import. An error of the record must not become an error of the import."""
        if _getpid() != self._pid or self._shared is None:  # a process that the rank has forked
            return
        try:
            with self._lock:
                self._note(name)
        except Exception:
            self._shared = None  # type: ignore[assignment]

    def _note(self, name: str) -> None:
        self._note_origins()
        variables = os.environ._data  # type: ignore[attr-defined]
        if variables != self._last:
            self._last = dict(variables)
            self._write("env", self._changed())
        self._write("begin", name, self._in_progress[-1] if self._in_progress else "")
        self._in_progress.append(name)
        self._unfinished.append(name)

    def _changed(self) -> dict[str, str | None]:
        names = self._first.keys() | self._last.keys()
        changed = {name for name in names if self._first.get(name) != self._last.get(name)}
        return {os.fsdecode(name): _decoded(self._last.get(name)) for name in sorted(changed)}

    def finish(self) -> None:
        """Record the files of all modules that were found."""
        with self._lock:
            self._note_origins()

    def text(self) -> bytes:
        return bytes(self._shared[: self._end])

    def _note_origins(self) -> None:
        still = []
        for name in self._unfinished:
            module = sys.modules.get(name)
            if module is None:  # not found, or not created yet
                still.append(name)
            else:
                self._write("from", name, _origin(module))
        self._unfinished = still[-16:]
        while self._in_progress and not _is_in_progress(self._in_progress[-1]):
            self._in_progress.pop()

    def _write(self, *words: Any) -> None:
        line = json.dumps(words).encode() + b"\n"
        end = self._end + len(line)
        if end >= len(self._shared):
            raise BufferError("the record is full")
        self._shared[self._end : end] = line
        self._end = end


def _origin(module: Any) -> str:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if origin is None:  # a package without a file of its own
        origin = next(
            (f"{folder}/" for folder in getattr(spec, "submodule_search_locations", None) or ()), ""
        )
    return str(origin)


def _is_in_progress(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), _CODE_RUNS, False))


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)
