"""Variables that a script sets before it imports torch. The zygote has imported torch without them.

The launcher searches the script for such variables before it starts (`launcher.ranks.zygote`), but not the
packages that are installed. So a rank compares the variables when the script first imports torch. It cannot start anew
then, because it would repeat what the script has done. It tells the zygote, and the agent warns the user.

An import statement that finds its module in `sys.modules` asks the spec of the module whether the import is still
running. Until the first import of torch, this attribute of all specs is a property, which notices the import. Nothing
of it remains then.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from types import CodeType
from typing import TYPE_CHECKING, Any

from .import_variables import is_fixed_natively
from .messages import Late

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        variables, file = json.loads(self._shared[:end])
        return Late(tuple(variables), file)

    # --- in the rank ---------------------------------------------------------------------------------

    def begin(self, read: Iterable[str], preloaded: Iterable[str]) -> None:
        """`read`: names of variables that the imports in the zygote have read."""
        packages = {"torch", *(name.partition(".")[0] for name in preloaded)}
        self._first, self._read = dict(os.environ), frozenset(read)
        self._modules = frozenset(sys.modules)
        specs: Any = ModuleSpec

        def is_initializing(spec: Any) -> Any:
            if getattr(spec, "name", "").partition(".")[0] in packages:
                with contextlib.suppress(Exception):  # it must not become an error of the import
                    del specs._initializing
                    self._compare()
            try:
                return vars(spec)["_initializing"]
            except KeyError:
                raise AttributeError("_initializing") from None

        def set_initializing(spec: Any, value: bool) -> None:
            vars(spec)["_initializing"] = value

        specs._initializing = property(_unseen(is_initializing), _unseen(set_initializing))

    @_unseen
    def _compare(self) -> None:
        now = dict(os.environ)
        late = [
            name
            for name in sorted(self._first.keys() | now.keys())
            if now.get(name) != self._first.get(name) and (name in self._read or is_fixed_natively(name))
        ]
        if late:
            note = json.dumps((late, self._file_with(late[0]))).encode() + b"\n"
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
