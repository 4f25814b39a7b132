"""Writes what a command found: text for people, JSON or YAML for programs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rendezvous.values.error_codes import Code, with_code

# Write plain values as readable YAML. Pure. Ambiguous scalars are quoted as in JSON.

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


JSON, YAML = "json", "yaml"
_FOR_PROGRAMS = (JSON, YAML)


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option for the format. The main parser has its default."""
    parser.add_argument(
        "-o",
        "--output",
        choices=["text", "table", *_FOR_PROGRAMS],
        default=argparse.SUPPRESS,
        help="output format (default: text; table is the same)",
    )


def is_for_programs(output: str) -> bool:
    return output in _FOR_PROGRAMS


def show(what: dict[str, Any] | str, output: str, *, compact: bool = False) -> None:
    """Write text as it is, and a mapping in the format `output`. `compact`: one of many, as a line of JSON."""
    if isinstance(what, str):
        write(what)
    elif output == YAML:
        write(("---\n" if compact else "") + documents([what]))
    else:
        write(json.dumps(what, indent=None if compact else 2))


def write(text: str) -> None:
    """Write whole lines at once."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def warn(text: str, code: Code | None = None) -> None:
    """`code`: of an error because of which the command fails; a warning has none."""
    sys.stderr.write(f"ddpctl: {with_code(text, code) if code else text}\n")
    sys.stderr.flush()


def as_dict(message: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict  # not for --help: it needs 50 ms

    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
