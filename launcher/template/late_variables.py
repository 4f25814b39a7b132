"""Variables that a script sets before it imports torch. The zygote has imported torch without them.

The launcher searches the script for such variables before it starts (`launcher.ranks.zygote`), but not the
packages that are installed. So a rank compares the variables when the script first imports torch. It cannot start again
then, because it would repeat what the script has done. It tells the zygote, and the agent warns the user.

Until then, torch's modules are not in `sys.modules`, as in a new interpreter. The finder of modules on `sys.path`
returns them at the first import. So an import statement costs what it always does. Code that looks whether torch is
imported sees that it is not, and hooks that wait for its import run. Native code also imports through this finder.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from json import dumps, loads  # as they are now: a script may replace them
from types import CodeType, ModuleType
from typing import Any

from .import_variables import FIXED_NATIVELY
from .messages import Late

_NOTE_BYTES = 1 << 13
_MOST_SOURCE_BYTES = 1 << 20


def _unseen(function: Any) -> Any:
    """Tools that measure lines, such as coverage, leave out code that comes from no file."""

    def without_file(code: CodeType) -> CodeType:
        inner = (without_file(each) if isinstance(each, CodeType) else each for each in code.co_consts)
        return code.replace(co_filename="<ddp-launch>", co_consts=tuple(inner))

    function.__code__ = without_file(function.__code__)
    return function


class LateVariables:
    """What one rank tells the zygote, in memory that both share."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _NOTE_BYTES)
        self._zygote = os.getpid()

    def read(self) -> Late | None:
        end = self._shared.find(b"\n")
        if end < 0:
            return None
        with contextlib.suppress(ValueError, TypeError):  # the script has changed what writes it
            variables, file = loads(self._shared[:end])
            return Late(tuple(variables), file)
        return None

    # --- in the rank ---------------------------------------------------------------------------------

    def begin(self, read: Iterable[str], preloaded: Iterable[str]) -> None:
        """`read`: names of variables that the imports in the zygote have read."""
        self._first, self._read = dict(os.environ), frozenset(read)
        packages = {"torch", "ddp", *(name.partition(".")[0] for name in preloaded)} & sys.modules.keys()
        with contextlib.suppress(Exception):  # of a finder of somebody else
            if all(map(_is_found_on_path, packages)):
                _put_away(packages, self._compare)
        self._modules = frozenset(sys.modules)

    @_unseen
    def _compare(self) -> None:
        with contextlib.suppress(Exception):  # it must not become an error of the import
            self._tell(self._late())
        with contextlib.suppress(AttributeError, KeyError):  # a torch without it
            sys.modules["torch.distributed"].set_debug_level_from_env()  # as the import does, with its errors

    @_unseen
    def _late(self) -> list[str]:
        now = dict(os.environ)
        names = sorted(self._first.keys() | now.keys())
        changed = [name for name in names if now.get(name) != self._first.get(name)]
        return [name for name in changed if name in self._read or name.startswith(FIXED_NATIVELY)]

    @_unseen
    def _tell(self, late: list[str]) -> None:
        if late:
            note = dumps((late, self._file_with(late[0]))).encode() + b"\n"
            if len(note) <= _NOTE_BYTES:
                self._shared[: len(note)] = note
                os.kill(self._zygote, signal.SIGCHLD)  # it waits for the ends of its children

    @_unseen
    def _file_with(self, name: str) -> str:
        """Return the file of a module that seems to have set the variable; "" if none does."""
        for module, value in list(sys.modules.items()):
            file = getattr(value, "__file__", None)
            if module not in self._modules and isinstance(file, str) and file.endswith(".py"):
                with contextlib.suppress(OSError), open(file, "rb") as opened:
                    source = opened.read(_MOST_SOURCE_BYTES)
                    if name.encode() in source and (b"environ" in source or b"putenv" in source):
                        return file
        return ""


# --- modules that the script has not imported yet ------------------------------------------------------


def _is_found_on_path(name: str) -> bool:
    """Whether an import would ask the finder for `sys.path`, and no finder before it has the module."""
    if type(getattr(sys.modules[name].__spec__, "loader", None)) is not SourceFileLoader:
        return False
    asked = sys.meta_path[: sys.meta_path.index(PathFinder)]
    return all(finder.find_spec(name, None) is None for finder in asked)


def _put_away(packages: Iterable[str], note: Callable[[], None]) -> None:
    """Take these packages out of `sys.modules`. The import of each puts it back."""
    away: dict[str, _Package] = {}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(away))  # what is never imported stays, also at exit
    for package in packages:
        names = [name for name in sys.modules if name.partition(".")[0] == package]
        away[package] = _Package(package, {name: sys.modules.pop(name) for name in names}, away, note)
    original = vars(PathFinder)["find_spec"]

    @_unseen
    def find_spec(finder: Any, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in away or path is not None:
            return original.__func__(finder, fullname, path, target)
        return spec_from_file_location(fullname, loader=away[fullname])

    PathFinder.find_spec = classmethod(find_spec)  # type: ignore[method-assign, assignment]


class _Package:
    """Loads a package that is away. It is no `SourceFileLoader`, which some hooks replace by their own."""

    def __init__(
        self, name: str, modules: dict[str, ModuleType], away: dict[str, _Package], note: Callable[[], None]
    ) -> None:
        self._module, self._modules, self._away, self._note = modules.pop(name), modules, away, note
        self._spec: Any = self._module.__spec__

    @_unseen
    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader, name)

    @_unseen
    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        """Put its other modules back first: as soon as it is there, other threads search them."""
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)
        return self._module

    @_unseen
    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self._spec, self._spec.loader
        if self._away.pop(module.__name__, None) is None:
            return  # loaded once more, from a spec that was found before
        if module.__name__ == "torch":
            self._note()
        else:
            importlib.import_module("torch")
