"""Write plain values as readable YAML. Pure. Ambiguous scalars are quoted as in JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Unquoted: begins with a letter and has only characters without a meaning in YAML. `_OTHERS` excludes true, null etc.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*(:[A-Za-z0-9._/-]+)*")
_OTHERS = re.compile(r"(?i)y|n|yes|no|true|false|on|off|null|nan|inf")


def documents(objects: Sequence[Mapping[str, Any]]) -> str:
    return "---\n".join("".join(f"{line}\n" for line in _mapping(each, "")) for each in objects)


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, each in value.items():
        yield from _entry(f"{indent}{_scalar(key)}:", each, indent + "  ", indent)


def _entry(head: str, value: Any, indent: str, list_indent: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield head
        yield from _mapping(value, indent)
    elif isinstance(value, list) and value:
        yield head
        yield from _list(value, list_indent + "  ")
    else:
        yield f"{head} {_scalar(value)}"


def _list(value: Sequence[Any], indent: str) -> Iterator[str]:
    for each in value:
        if isinstance(each, dict) and each:
            lines = list(_mapping(each, indent + "  "))
            yield f"{indent}- {lines[0].lstrip()}"
            yield from lines[1:]
        else:
            yield f"{indent}- {_scalar(each)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _OTHERS.fullmatch(value):
        return value
    if isinstance(value, float):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))  # without a decimal point it would be a string
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
