"""Writes what a command found: text for people, JSON or YAML for programs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rendezvous.control.yaml_text import documents
from rendezvous.values.error_codes import Code, with_code

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
