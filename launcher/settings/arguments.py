"""Read the command line: our options come first; the first word that is not an option is the script.

The syntax is torchrun's: `--nproc-per-node` or `--nproc_per_node`, `--flag value` or `--flag=value`, any unique
abbreviation, and joined short switches (`-mr3`).
"""

from __future__ import annotations

from dataclasses import field

from launcher.settings.options import BY_SHORT, BY_SPELLING, matching, negates
from launcher.settings.values import Option, nearest, printable
from rendezvous.values.contracts import INVALID_USAGE
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.late_dataclass import dataclass


class UsageError(Coded):
    """Ends the command with `exit_code`; its text is printed as one line."""

    exit_code = INVALID_USAGE
    code = Code.INVALID_VALUE


@dataclass(frozen=True, slots=True)
class Typed:
    """An option on the command line: its spelling with abbreviations expanded, and its text."""

    spelling: str
    text: str


@dataclass(slots=True)
class CommandLine:
    options: dict[str, Typed] = field(default_factory=dict)  # by Option.dest; the last occurrence wins
    words: tuple[str, ...] = ()  # the script and its arguments; after --help, what help is wanted about

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
        if line.wants("help"):
            line.words = tuple(argv[at:])
    return line


def _read_long(line: CommandLine, argv: list[str], at: int) -> int:
    name, equals, value = argv[at].partition("=")
    spelling = _spelling(name, argv[at + 1 :])
    option = BY_SPELLING[spelling]
    if option.is_switch:
        if equals:
            raise UsageError(
                f"invalid {printable(argv[at])}: {spelling} is a switch and takes no value. Use {spelling} alone."
            )
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
            raise UsageError(_unknown(argv[at], argv[at + 1 :]), code=Code.UNKNOWN_OPTION)
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
        raise UsageError(
            f"ambiguous option {printable(name)}: it matches {', '.join(found)}. Use the full name.",
            code=Code.AMBIGUOUS_OPTION,
        )
    if not found:
        raise UsageError(_unknown(name, rest), code=Code.UNKNOWN_OPTION)
    return found[0]


def _next_value(spelling: str, argv: list[str], at: int) -> str:
    """The next word. A word that starts with a dash is an option, unless it is a number or contains a space."""
    if at + 1 == len(argv):
        raise UsageError(
            f"missing value for {spelling}. Run ddp-launch --help all to see what it accepts.",
            code=Code.MISSING_VALUE,
        )
    value = argv[at + 1]
    if len(value) > 1 and value.startswith("-") and not value[1].isdigit() and " " not in value:
        raise UsageError(
            f"missing value for {spelling}: the next word {printable(value)} looks like an option. "
            f"If it is the value, use {spelling}={printable(value)}.",
            code=Code.MISSING_VALUE,
        )
    return value


def _unknown(name: str, rest: list[str]) -> str:
    message = f"unknown option {printable(name)}."
    close = nearest(name.lstrip("-").replace("_", "-"), [spelling[2:] for spelling in BY_SPELLING])
    if close:
        return f"{message} Did you mean --{close}?"
    script = next((word for word in rest if word.endswith(".py")), None)
    if script:
        return (
            f"{message} Put options of the script after {printable(script)}. Run ddp-launch --help all to see all "
            "options."
        )
    return f"{message} Run ddp-launch --help all to see all options."
