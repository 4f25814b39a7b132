"""Where a rank searches for modules, and which files of the user hide a module there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from launcher.settings.spec import EntryKind, EntryPoint

_OF_LIBRARIES = frozenset(("site-packages", "dist-packages"))
# The interpreter has imported them before it searches any folder of the user.
_SETTLED = frozenset(
    "abc codecs encodings genericpath io os posixpath site stat _collections_abc _sitebuiltins".split()
)


def script_folder(entry: EntryPoint) -> str:
    """`sys.path[0]` of a rank, unless it has a safe path."""
    if entry.kind is EntryKind.SCRIPT:
        target = os.path.realpath(entry.target)
        return target if os.path.isdir(target) else os.path.dirname(target)
    return os.getcwd()


def import_path(environ: Mapping[str, str]) -> list[str]:
    """`sys.path[1:]` of a rank that uses our interpreter. In our own process the folders of PYTHONPATH come last."""
    first = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [*first, *(entry for entry in sys.path if entry not in first)]


def files_that_hide(names: tuple[str, ...], entry: EntryPoint, environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of `names` that a file of the user hides from the standard library or from an installed package."""
    users = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if not environ.get("PYTHONSAFEPATH"):
        users.insert(0, script_folder(entry))
    users = [folder for folder in users if _OF_LIBRARIES.isdisjoint(Path(folder).parts)]
    others = [folder for folder in import_path(environ) if folder not in users]
    found = {}
    for name in names:
        if name in _SETTLED or name in sys.builtin_module_names:
            continue
        file = next(filter(None, (_module_in(folder, name) for folder in users)), "")
        if file and (name in sys.stdlib_module_names or any(_module_in(each, name) for each in others)):
            found[name] = file
    return found


def _module_in(folder: str, name: str) -> str:
    """Return the package or file that `import name` finds in this folder; "" if there is none."""
    package = os.path.join(folder, name)
    if os.path.isfile(os.path.join(package, "__init__.py")):
        return package
    return next((package + end for end in (".py", *EXTENSION_SUFFIXES) if os.path.isfile(package + end)), "")
