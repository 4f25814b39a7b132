"""Reads the command line: options up to the first word that is none; all the rest is the script's.

Spelling is torchrun's: `--nproc-per-node` or `--nproc_per_node`, `--flag value` or `--flag=value`, any
abbreviation that fits one option only, short switches joined (`-mr3`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.settings.options import BY_SHORT, BY_SPELLING, matching, negates
from launcher.settings.values import nearest, shown

if TYPE_CHECKING:
    from launcher.settings.option import Option


class UsageError(Exception):
    """Ends the command with exit code 2; the text is the one line that is printed."""


@dataclass(frozen=True, slots=True)
class Typed:
    """An option on the command line: as spelled (abbreviations written out), and its text."""

    spelling: str
    text: str


@dataclass(slots=True)
class CommandLine:
    options: dict[str, Typed] = field(default_factory=dict)  # by Option.dest; the last one counts
    words: tuple[str, ...] = ()  # the script and its arguments

    def wants(self, dest: str) -> bool:
        return dest in self.options


def read_arguments(argv: list[str]) -> CommandLine:
    line = CommandLine()
    at = 0
    while at < len(argv) and not line.wants("help") and not line.wants("version"):
        word = argv[at]
        if word == "--" or word == "-" or not word.startswith("-"):
            line.words = tuple(argv[at + (word == "--") :])
            break
        at = _read_long(line, argv, at) if word.startswith("--") else _read_short(line, argv, at)
    return line


def _read_long(line: CommandLine, argv: list[str], at: int) -> int:
    name, equals, value = argv[at].partition("=")
    spelling = _spelling(name, argv[at + 1 :])
    option = BY_SPELLING[spelling]
    if option.is_switch:
        if equals:
            raise UsageError(f"{spelling}: takes no value; write {spelling} alone")
        line.options[option.dest] = Typed(spelling, "0" if negates(spelling) else "1")
        return at + 1
    if not equals:
        value = _next_value(spelling, argv, at)
    line.options[option.dest] = Typed(spelling, value)
    return at + (1 if equals else 2)


def _read_short(line: CommandLine, argv: list[str], at: int) -> int:
    letters = argv[at][1:]
    while letters:
        short, letters = "-" + letters[0], letters[1:]
        option: Option | None = BY_SHORT.get(short)
        if option is None:
            raise UsageError(_unknown(argv[at], argv[at + 1 :]))
        if option.is_switch:
            line.options[option.dest] = Typed(short, "1")
            continue
        value = letters.removeprefix("=") if letters else _next_value(short, argv, at)
        line.options[option.dest] = Typed(short, value)
        return at + (1 if letters else 2)
    return at + 1


def _spelling(name: str, rest: list[str]) -> str:
    found = matching("--" + name[2:].replace("_", "-"))
    if len(found) > 1:
        raise UsageError(f"{shown(name)}: could be {', '.join(found)}; write it out")
    if not found:
        raise UsageError(_unknown(name, rest))
    return found[0]


def _next_value(spelling: str, argv: list[str], at: int) -> str:
    """A word with a dash in front is an option, not a value, unless it is a number or holds a space."""
    if at + 1 == len(argv):
        raise UsageError(f"{spelling}: needs a value; see ddp-launch --help")
    value = argv[at + 1]
    if len(value) > 1 and value.startswith("-") and not value[1].isdigit() and " " not in value:
        raise UsageError(
            f"{spelling}: needs a value, found {shown(value)}; if that is it, write {spelling}={shown(value)}"
        )
    return value


def _unknown(name: str, rest: list[str]) -> str:
    message = f"{shown(name)}: no such option"
    close = nearest(name.lstrip("-").replace("_", "-"), [spelling[2:] for spelling in BY_SPELLING])
    if close:
        return f"{message}; did you mean --{close}?"
    script = next((word for word in rest if word.endswith(".py")), None)
    if script:
        return f"{message}; options of the script go after {shown(script)}, ours are in ddp-launch --help"
    return f"{message}; all options are in ddp-launch --help"
