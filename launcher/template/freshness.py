"""Whether what a template has imported is still what an interpreter would import now.

A module counts as changed if its file has another size, time or inode. For the folders that are searched, the names in
them count that can be imported: a new file may come before one that was imported, or complete an optional import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_CODE = (".py", ".pyc", ".so", ".pth", ".egg-link")
_DISTRIBUTIONS = (".dist-info", ".egg-info")
_OF_THE_MACHINE = ("/etc/localtime",)
# In lines of `.pth` files that only add finders or namespaces. Coverage does nothing without its variable.
_ADD_FINDERS = (
    "import __editable__",
    "import _virtualenv",
    "_distutils_hack",
    "COVERAGE_PROCESS_START",
    "importlib.machinery.PathFinder.find_spec",
    "_cuda_bindings_redirector",
)

Mark = tuple[int, int, int]  # time of change, size, inode


class ImportedFiles(NamedTuple):
    """Files and searched folders, as they were when the template was made."""

    files: dict[str, Mark | None]
    folders: dict[str, tuple[Mark | None, frozenset[str]]]


def take(modules: Mapping[str, Any], search_path: Iterable[str], libraries: Iterable[str]) -> ImportedFiles:
    files = {*_OF_THE_MACHINE, os.path.join(sys.prefix, "pyvenv.cfg"), sys.executable, *libraries}
    for module in list(modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            files.add(file)
    folders: dict[str, tuple[Mark | None, frozenset[str]]] = {}
    for folder in search_path:
        names = importable(folder)
        folders[folder] = (mark(folder), names)
        files.update(os.path.join(folder, name) for name in names if name.endswith((".pth", *_DISTRIBUTIONS)))
    return ImportedFiles({file: mark(file) for file in sorted(files)}, folders)


def change(snapshot: ImportedFiles) -> str:
    """Return what has changed since then; "" if nothing has."""
    for file, before in snapshot.files.items():
        if mark(file) != before:
            return f"{file} has changed" if before else f"{file} is new"
    for folder, (before, names) in snapshot.folders.items():
        if mark(folder) == before:
            continue
        for name in sorted(names ^ importable(folder)):
            return f"{os.path.join(folder, name)} is {'gone' if name in names else 'new'}"
    return ""


def changed_after(snapshot: ImportedFiles, time_s: float) -> str:
    """Return a file that changed while the template was made: it may have been read before or after that."""
    for file, seen in snapshot.files.items():
        if seen is not None and seen[0] >= time_s * 1e9 and not file.endswith(_DISTRIBUTIONS):
            return f"{file} changed during the import"
    return ""


def importable(folder: str) -> frozenset[str]:
    """Return the names in this folder that are modules, packages, or installed distributions."""
    found = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name.endswith((*_CODE, *_DISTRIBUTIONS)) or (name.isidentifier() and entry.is_dir()):
                    found.add(name)
    except OSError:  # a zip file, or a folder that is not there
        return frozenset()
    return frozenset(found - {"__pycache__"})


def loaded_libraries() -> set[str]:
    """Return the files of code that this process has mapped."""
    found = set()
    with open("/proc/self/maps") as file:
        for line in file:
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/") and "x" in words[1]:
                found.add(words[5].rstrip("\n"))
    return found


def starts_code_of_the_user() -> str:
    """Return a file of the user that runs at each start of the interpreter, and may do something else each time."""
    library = os.path.join(os.path.dirname(os.__file__), "")
    for name in ("sitecustomize", "usercustomize"):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if (
            file
            and not os.path.realpath(file).startswith((library, "/etc/", "/usr/lib/"))
            and not _is_ours(file)
        ):
            return f"{file} runs at each start of Python"
    for folder in sys.path:
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            for file in _pth_files(folder):
                if _runs_code(file):
                    return f"{file} runs code at each start of Python"
    return ""


def _pth_files(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [os.path.join(folder, name) for name in sorted(names) if name.endswith(".pth")]


def _runs_code(file: str) -> bool:
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            code = [line for line in lines if line.startswith(("import ", "import\t"))]
    except OSError:
        return False
    return any(not any(each in line for each in _ADD_FINDERS) for line in code)


def _is_ours(file: str) -> bool:
    return os.path.dirname(os.path.dirname(os.path.realpath(file))) == os.path.dirname(
        os.path.realpath(__file__)
    )


def mark(path: str) -> Mark | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
