"""Finds out whether a script sets variables that torch reads when it is imported.

Ranks that are forked from a process with torch would ignore such a variable without a word. So these scripts start
without the fork. The script and the modules of its own folder that it imports are searched for the names; an installed
module that sets such a variable is not found here, but in the ranks (`launcher.template.late_variables`).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from launcher.settings.import_path import script_folder
from launcher.settings.spec import EntryKind
from launcher.template.import_variables import FIXED_NATIVELY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launcher.settings.spec import EntryPoint

_IMPORT = re.compile(r"^\s*(?:from\s+(\.*)([\w.]*)\s+import\s+([\w ,]*)|import\s+([\w ,.]+))", re.MULTILINE)
_MOST_FILES, _MOST_BYTES = 100, 1 << 20


def early_variable(entry: EntryPoint) -> str:
    """Return a variable that the script seems to set itself; "" if there is none."""
    if entry.kind is EntryKind.PROGRAM:
        return ""
    base, files = _first_files(entry)
    seen: set[str] = set()
    while files and len(seen) < _MOST_FILES:
        file = os.path.realpath(files.pop())
        if file in seen:
            continue
        seen.add(file)
        source = _source_of(file)
        if name := _set_in(source):
            return name
        files += _imported_files(source, base, os.path.dirname(file))
    return ""


def _first_files(entry: EntryPoint) -> tuple[str, list[str]]:
    """Return the folder of the script's own modules, and the files that run first."""
    folder = script_folder(entry)
    if entry.kind is not EntryKind.MODULE:
        return folder, [entry.target]
    return folder, [*_files_of(folder, entry.target), *_files_of(folder, f"{entry.target}.__main__")]


def _files_of(folder: str, module: str) -> Iterator[str]:
    """Yield the files below the folder that run when the module is imported, those of its packages too."""
    path = folder
    for part in module.split("."):
        path = os.path.join(path, part)
        for file in (f"{path}.py", os.path.join(path, "__init__.py")):
            if os.path.isfile(file):
                yield file


def _imported_files(source: str, base: str, folder: str) -> Iterator[str]:
    for dots, origin, names, modules in _IMPORT.findall(source):
        above = os.path.normpath(os.path.join(folder, *[os.pardir] * (len(dots) - 1))) if dots else base
        found = [word.split()[0] for word in modules.split(",") if word.strip()]
        found += [f"{origin}.{word.split()[0]}".strip(".") for word in names.split(",") if word.strip()]
        for module in (*found, origin):
            yield from _files_of(above, module)


def _source_of(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _set_in(source: str) -> str:
    if "environ" not in source and "putenv" not in source:
        return ""
    names = (name for name in FIXED_NATIVELY if f'"{name}' in source or f"'{name}" in source)
    return next((f"{name}*" if name.endswith("_") else name for name in names), "")
