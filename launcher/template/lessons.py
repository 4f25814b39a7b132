"""What the zygote of a command has learned, kept in the folder of the warm pool for the next command.

A lesson names the modules that the zygote has imported after its ranks, each with the variables that the script had
set by then, and the files of the user that the ranks had executed. It holds while none of these files has changed: an
edited script may set other variables before it imports the same modules.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from . import freshness
from .import_records import is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .freshness import Mark
    from .import_records import Record, Variables

Module = tuple[str, "Variables"]


class Lesson(NamedTuple):
    args: tuple[str, ...]  # of the script
    modules: tuple[Module, ...]
    files: dict[str, Mark | None]  # None: it must not appear


def files_of_user(script: str, records: Sequence[Record], folders: Iterable[str], stdlib: str) -> set[str]:
    """The files of the user that the ranks have read, and those that would have been read first.

    `folders`: where modules are searched. A module without a known file was not there, or was the last one.
    """
    found = {script}
    searched = [folder for folder in folders if not is_installed(os.path.join(folder, ""), stdlib)]
    for record in records:
        for name in record.environments:
            origin = record.origins.get(name, "")
            if origin and not is_installed(origin, stdlib):
                found.add(origin)
            if not origin:
                path = name.replace(".", os.sep)
                for folder in (os.path.dirname(script), *searched):
                    found |= {os.path.join(folder, f"{path}.py"), os.path.join(folder, path, "__init__.py")}
    return found


def marks_before(files: Iterable[str], time_s: float) -> dict[str, Mark | None] | None:
    """The marks of these files; None if one has changed since this time, when the ranks were forked."""
    marks = {file: freshness.mark(file) for file in files}
    return None if any(mark and mark[0] >= time_s * 1e9 for mark in marks.values()) else marks


def write(path: str, lesson: Lesson) -> None:
    """It is no error if that is not possible."""
    part = f"{path}.{os.getpid()}.part"
    with contextlib.suppress(OSError):
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(lesson, file)
        os.rename(part, path)


def take(path: str) -> Lesson | None:
    """Read and remove a lesson. None if there is none, or if a file has changed since."""
    try:
        with open(path) as file:
            args, modules, files = json.load(file)
        os.unlink(path)
        lesson = Lesson(tuple(args), tuple((name, variables) for name, variables in modules), _marks(files))
    except (OSError, ValueError, TypeError):
        return None
    return lesson if lesson.modules and all(freshness.mark(f) == m for f, m in lesson.files.items()) else None


def _marks(found: dict[str, Any]) -> dict[str, Mark | None]:
    return {file: None if mark is None else (mark[0], mark[1], mark[2]) for file, mark in found.items()}
