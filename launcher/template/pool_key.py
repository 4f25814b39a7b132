"""What a warm template was started under, as names and values: pure functions.

A rank inherits more than the environment: folder, limits, priority, control group, namespaces. The template cannot take
these over from a command, so they must be equal. They form its key, whose digest is the name of its socket.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from .import_variables import is_read_natively

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Key = dict[str, str]
_VARIABLE = "variable "
_MOST_WORDS = 4

_NOT_SET = ""
# Read by the interpreter at its start, or by the C library: no import shows that.
_READ_AT_START = tuple("PYTHON LC_ LANG LOCPATH LD_ GLIBC_TUNABLES TZ HOME SETUPTOOLS_ COVERAGE_".split())


def of_variables(environ: Mapping[str, str]) -> Key:
    """All variables of a command, as digests: the key is written to a file, and variables hold passwords."""
    return {_VARIABLE + name: digest(f"{name}={value}") for name, value in environ.items()}


def of_template(key: Key, read: Iterable[str]) -> Key:
    """The key of the command that has started the template, without the variables that do not matter.

    `read`: the names that its imports have read, whether they were set or not.
    """
    names = {_VARIABLE + name for name in read}
    kept = {name: value for name, value in key.items() if name in names or _is_of_start(name)}
    return dict.fromkeys(names, _NOT_SET) | kept


def _is_of_start(name: str) -> bool:
    variable = name.removeprefix(_VARIABLE)
    return variable == name or variable.startswith(_READ_AT_START) or is_read_natively(variable)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def name_of(key: Key) -> str:
    return digest(json.dumps(sorted(key.items())))


def differences(mine: Key, theirs: Key) -> list[str]:
    """Say why a template does not serve a command. `theirs`: see `of_template`."""
    found = []
    for name in sorted(theirs.keys() | {each for each in mine if _is_of_start(each)}):
        here, there = mine.get(name, _NOT_SET), theirs.get(name, _NOT_SET)
        if here == there:
            continue
        if name.startswith(_VARIABLE):
            what = "has another value" if here and there else "is set" if here else "is not set"
            found.append(f"{name} {what}")
        else:
            found.append(f"{name} is {here or 'unknown'}, not {there or 'unknown'}")
    return found


def why_missed(mine: Key, templates: list[Key]) -> str:
    """Return how the command differs from the template that comes closest; "" if there is no template."""
    if not templates:
        return ""
    words = min((differences(mine, each) for each in templates), key=len)
    more = len(words) - _MOST_WORDS
    return "; ".join(words[:_MOST_WORDS]) + (f"; and {more} more" if more > 0 else "")
