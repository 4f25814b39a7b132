"""A parser of command lines whose errors end with a code."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from rendezvous.values.error_codes import Code, with_code

# argparse has one class for all mistakes, so its words tell them apart. If it changes a word, the code is less precise.
_KINDS = (
    (re.compile(r"unrecognized arguments:.* -"), Code.UNKNOWN_OPTION),
    (re.compile(r"ambiguous option:"), Code.AMBIGUOUS_OPTION),
    (re.compile(r"argument .*: expected "), Code.MISSING_VALUE),
    (re.compile(r"argument .*: not allowed with argument"), Code.CONTRADICTING_OPTIONS),
    (re.compile(r"argument COMMAND: "), Code.INVALID_COMMAND_LINE),
    (re.compile(r"argument .*: "), Code.INVALID_VALUE),
)


SHELLS = ("bash", "zsh", "fish", "tcsh")  # for which a wing makes scripts


class CodedParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(with_code(message, code_of(message)))


def add_completion(commands: Any) -> None:
    command = commands.add_parser("completion", help="print a script for your shell that completes commands")
    command.add_argument("shell", choices=SHELLS)


def code_of(message: str) -> Code:
    """The code of an error of argparse."""
    return next((code for kind, code in _KINDS if kind.match(message)), Code.INVALID_COMMAND_LINE)
