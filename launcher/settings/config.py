"""Merges what was asked for: flag, then environment, then file, then default.

Each setting keeps where it came from, so that a message about it quotes what the user wrote where the
user wrote it, and `--print-config` can show it. Pure: the environment and the file are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.settings.arguments import CommandLine, UsageError
from launcher.settings.option import Option, Reach
from launcher.settings.options import BY_SPELLING, OPTIONS, negates
from launcher.settings.values import BadValue, nearest, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "DDP_LAUNCH_"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as read: text by option, in the same form as on the command line."""

    name: str = ""
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # dest -> key as written, text
    words: tuple[str, ...] = ()  # script and args


@dataclass(frozen=True, slots=True)
class Origin:
    place: str  # "flag", a variable, a file, "default"
    name: str  # the option as it is called there
    joint: str = " "  # between name and value

    def quote(self, text: str) -> str:
        where = f"{self.place}: " if self.joint == " = " else ""
        return f"{where}{self.name}{self.joint}{shown(text)}"


@dataclass(frozen=True, slots=True)
class Setting:
    option: Option
    origin: Origin
    text: str | None
    value: Any

    @property
    def given(self) -> bool:
        return self.origin.place != "default"

    @property
    def quoted(self) -> str:
        if self.option.is_switch and self.origin.place == "flag":
            return self.origin.name
        return self.origin.quote(self.text or "")

    def wrong(self, problem: str, fix: str = "") -> UsageError:
        return UsageError(f"{self.quoted}: {problem}" + (f"; {fix}" if fix else ""))


@dataclass(frozen=True, slots=True)
class Settings:
    by_dest: dict[str, Setting]

    def __getitem__(self, dest: str) -> Any:
        return self.by_dest[dest].value

    def of(self, dest: str) -> Setting:
        return self.by_dest[dest]


def merge(line: CommandLine, environ: Mapping[str, str], file: ConfigFile) -> Settings:
    return Settings({option.dest: _setting(option, line, environ, file) for option in OPTIONS})


def _setting(option: Option, line: CommandLine, environ: Mapping[str, str], file: ConfigFile) -> Setting:
    origin, text = _source(option, line, environ, file)
    if text is None:
        return Setting(option, origin, None, None)
    try:
        return Setting(option, origin, text, option.parse(text))
    except BadValue as bad:
        raise UsageError(_explain(origin, text, bad)) from None


def _source(
    option: Option, line: CommandLine, environ: Mapping[str, str], file: ConfigFile
) -> tuple[Origin, str | None]:
    typed = line.options.get(option.dest)
    if typed:
        return Origin("flag", typed.spelling), typed.text
    for variable in option.variables:
        if environ.get(variable):  # empty is as good as unset
            return Origin(variable, variable, "="), environ[variable]
    if option.foreign:
        variable, translate = option.foreign
        if environ.get(variable):
            return Origin(variable, variable, "="), translate(environ[variable])
    if option.dest in file.settings:
        key, text = file.settings[option.dest]
        return Origin(file.name, key, " = "), text
    return Origin("default", option.flag), option.default


def _explain(origin: Origin, text: str, bad: BadValue) -> str:
    message = f"{origin.quote(text)}: {bad.problem}"
    if not bad.form:
        return message
    example = f"{origin.name}{origin.joint}{bad.example}"
    if origin.joint == " = ":
        example = f'{origin.name} = "{bad.example}"'
    elif " " in bad.example:
        example = f"{origin.name}{origin.joint}'{bad.example}'"
    return f"{message}; write {bad.form}, e.g. {example}"


def config_path(line: CommandLine, environ: Mapping[str, str]) -> Setting:
    """The one setting that has to be known before the others."""
    return _setting(BY_SPELLING["--config"], line, environ, ConfigFile())


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """DDP_LAUNCH_ variables that name no option: a warning for each, with what may have been meant."""
    known = [variable for option in OPTIONS for variable in option.variables]
    ours = [variable.removeprefix(_PREFIX) for variable in known if variable.startswith(_PREFIX)]
    found = []
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known:
            close = nearest(variable.removeprefix(_PREFIX), ours)
            meant = f"; did you mean {_PREFIX}{close}?" if close else ""
            found.append(f"{shown(variable)}: no such option{meant}")
    return tuple(found)


def config_from(name: str, table: Mapping[str, Any]) -> ConfigFile:
    """A parsed TOML table as settings; `name` is the file's, for messages."""
    settings: dict[str, tuple[str, str]] = {}
    words: list[str] = []
    if "script" in table:
        words.append(_scalar(name, "script", table["script"]))
    if "args" in table:
        if "script" not in table or not isinstance(table["args"], list):
            raise UsageError(
                f'{name}: args: is a list that goes with a script; write script = "train.py" too'
            )
        words.extend(_scalar(name, "args", each) for each in table["args"])
    for key, value in table.items():
        if key in ("script", "args"):
            continue
        spelling = "--" + key.replace("_", "-")
        option = BY_SPELLING.get(spelling)
        if option is None or option.reach < Reach.FILE:
            raise UsageError(_unknown_key(name, key, option))
        if option.dest in settings:
            raise UsageError(f"{name}: {key}: given twice, as {settings[option.dest][0]} too; keep one")
        settings[option.dest] = (key, _file_text(name, key, value, option))
    return ConfigFile(name, settings, tuple(words))


def _unknown_key(name: str, key: str, option: Option | None) -> str:
    if option:
        return f"{name}: {shown(key)}: cannot be set in a file; give {option.flag} as a flag"
    known = [spelling[2:] for spelling, each in BY_SPELLING.items() if each.reach == Reach.FILE] + [
        "script",
        "args",
    ]
    close = nearest(key.replace("_", "-"), known)
    hint = f"did you mean {close}?" if close else "keys are the long flags, see ddp-launch --help"
    return f"{name}: {shown(key)}: no such option; {hint}"


def _file_text(name: str, key: str, value: object, option: Option) -> str:
    if option.is_switch:
        if not isinstance(value, bool):
            raise UsageError(f"{name}: {key} = {shown(str(value))}: is a switch; write {key} = true or false")
        return str(int(value != negates("--" + key.replace("_", "-"))))
    if isinstance(value, list):
        parts = [_scalar(name, key, each) for each in value]
        doubled = option.metavar.startswith("TEXT")  # where a comma can be part of a text
        return ",".join(part.replace(",", ",,") if doubled else part for part in parts)
    if isinstance(value, dict):
        return ",".join(f"{left}={_scalar(name, key, right)}" for left, right in value.items())
    return _scalar(name, key, value)


def _scalar(name: str, key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{name}: {key}: not a text or number: {shown(str(value))}")
    return _no_nul(name, key, str(value))


def _no_nul(name: str, key: str, text: str) -> str:
    if "\0" in text:
        raise UsageError(f"{name}: {key}: holds a NUL character; remove it")
    return text
