"""Hints for a user's file that hides a module of the same name: `json.py` beside the script hides Python's json.

The traceback shows it in two ways. A library imported a module from outside of all libraries, or found it without an
attribute. Or the agent has found such a file (`RankEnd.hiding`). The second is needed where the frame that raised is
in site-packages: a library that is too old for another one raises the same exception.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.failure.crash_text import Raised

_WITHOUT = re.compile(r"module '(\w+)[\w.]*' has no attribute")
_FROM = re.compile(r"cannot import name '\w+' from (?:partially initialized module )?'(\w+)[\w.]*'")
_BELOW = re.compile(r"No module named '(\w+)\.|'(\w+)' is not a package")
_MOST_NAMES = 8  # a chain of exceptions names few modules; each name is looked for in some folders
_OURS = "ddp"


def modules_named(text: str) -> tuple[str, ...]:
    """Return the top-level modules in which an import or an attribute was not found, the last ones first."""
    found = [match for pattern in (_WITHOUT, _FROM, _BELOW) for match in pattern.finditer(text)]
    found.sort(key=lambda match: match.start(), reverse=True)
    names = [next(filter(None, match.groups())) for match in found]
    return tuple(dict.fromkeys(names))[:_MOST_NAMES]


def hint_of_hidden(raised: Raised, hiding: Mapping[str, str]) -> str:
    """`hiding`: the names of modules that the user's files hide, with these files."""
    if raised.short_type not in ("AttributeError", "ImportError", "ModuleNotFoundError"):
        return ""
    for name in modules_named(raised.message):
        if name in hiding:
            return f"{hiding[name]} hides {_what(name)}: rename it"
    if raised.short_type == "AttributeError":
        return _without_attribute(raised)
    return _imported_by_library(raised) or _imported(raised.message)


def _without_attribute(raised: Raised) -> str:
    if re.search(rf"module '{_OURS}' has no attribute", raised.message):
        return _hides(_OURS)
    found = _WITHOUT.search(raised.message)
    deepest = raised.deepest_file
    is_pythons = "/lib/python" in deepest and not any(
        folder in deepest for folder in ("/site-packages/", "/dist-packages/")
    )
    return _hides(found[1], f"the module {found[1]} of Python") if found and is_pythons else ""


def _imported_by_library(raised: Raised) -> str:
    """A library has imported a module from outside of all libraries: it expected another one of that name."""
    found = re.search(r"cannot import name '\w+' from '(\w+)' \(([^)]*)\)", raised.message)
    hides = found is not None and "/lib/python" in raised.deepest_file and "/lib/python" not in found[2]
    return _hides(found[1], f"another module {found[1]}") if found and hides else ""


def _imported(message: str) -> str:
    if re.search(rf"from (partially initialized module )?'{_OURS}'|'{_OURS}\.'", message):
        return _hides(_OURS)
    if re.search(rf"No module named '{_OURS}\.|'{_OURS}' is not a package", message):
        return _hides(_OURS)
    hidden = re.search(r"'([^'.]+)' is not a package", message)
    return _hides(hidden[1], f"the package {hidden[1]}") if hidden else ""


def _hides(name: str, what: str = "") -> str:
    return (
        f"a file {name}.py or folder {name} beside the script or on PYTHONPATH hides {what or _what(name)}: "
        "rename it"
    )


def _what(name: str) -> str:
    return "the ddp library" if name == _OURS else f"the module {name} that others import"
