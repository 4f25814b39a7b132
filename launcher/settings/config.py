"""Merge the sources of options: a flag, else a variable, else the file, else the default.

Each setting keeps its origin. A message quotes the text that the user wrote and its source, and `--print-config` shows
the source. Pure: the caller passes the environment and the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from launcher.settings.arguments import CommandLine, UsageError
from launcher.settings.options import BY_SPELLING, OPTIONS, negates
from launcher.settings.values import BadValue, Option, Reach, nearest, printable, quote
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

_PREFIX = "DDP_LAUNCH_"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a file: the text of each option in the form of the command line."""

    name: str = ""
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # dest -> key as written, text
    words: tuple[str, ...] = ()  # script and args


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    place: str  # "flag", the name of a variable or a file, or "default"
    name: str  # name of the option in that place
    separator: str = " "  # between name and value

    def quote(self, text: str) -> str:
        return f"{self.name}{self.separator}{quote(text)}" + (f" in {self.place}" if self.is_file else "")

    @property
    def is_file(self) -> bool:
        return self.separator == " = "


@dataclass(frozen=True, slots=True)
class Setting:
    option: Option
    origin: SettingOrigin
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

    def wrong(self, problem: str, fix: str = "", *, code: Code = Code.INVALID_VALUE) -> UsageError:
        """`problem` and `fix` are sentences that start with a lower-case letter and have no full stop."""
        return UsageError(
            f"invalid {self.quoted}: {problem}." + (f" {fix[0].upper()}{fix[1:]}." if fix else ""), code=code
        )


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
        raise UsageError(_explain(origin, text, bad), code=Code.INVALID_VALUE) from None


def _source(
    option: Option, line: CommandLine, environ: Mapping[str, str], file: ConfigFile
) -> tuple[SettingOrigin, str | None]:
    typed = line.options.get(option.dest)
    if typed:
        return SettingOrigin("flag", typed.spelling), typed.text
    for variable in option.variables:
        if environ.get(variable):  # an empty variable counts as unset
            return SettingOrigin(variable, variable, "="), environ[variable]
    if option.foreign:
        variable, translate = option.foreign
        if environ.get(variable):
            return SettingOrigin(variable, variable, "="), translate(environ[variable])
    if option.dest in file.settings:
        key, text = file.settings[option.dest]
        return SettingOrigin(file.name, key, " = "), text
    return SettingOrigin("default", option.flag), option.default


def _explain(origin: SettingOrigin, text: str, bad: BadValue) -> str:
    message = f"invalid {origin.quote(text)}: {bad.problem}."
    if not bad.form:
        return message
    example = f"{origin.name}{origin.separator}{bad.example}"
    if origin.is_file:
        example = f'{origin.name} = "{bad.example}"'
    elif " " in bad.example:
        example = f"{origin.name}{origin.separator}'{bad.example}'"
    return f"{message} Use {bad.form}, for example {example}"


def config_path(line: CommandLine, environ: Mapping[str, str]) -> Setting:
    """The setting of --config, which is needed before the other settings."""
    return _setting(BY_SPELLING["--config"], line, environ, ConfigFile())


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One warning, with a suggestion, for each DDP_LAUNCH_ variable that does not match an option."""
    known = [variable for option in OPTIONS for variable in option.variables]
    ours = [variable.removeprefix(_PREFIX) for variable in known if variable.startswith(_PREFIX)]
    found = []
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known:
            close = nearest(variable.removeprefix(_PREFIX), ours)
            hint = (
                f"Did you mean {_PREFIX}{close}?"
                if close
                else "Run ddp-launch --help all to see all options."
            )
            found.append(f"variable {printable(variable)} does not match an option and has no effect. {hint}")
    return tuple(found)


def config_from(name: str, table: Mapping[str, Any]) -> ConfigFile:
    """Convert a parsed TOML table to settings; `name` is the name of the file for messages."""
    settings: dict[str, tuple[str, str]] = {}
    words: list[str] = []
    if "script" in table:
        words.append(_scalar(name, "script", table["script"]))
    if "args" in table:
        if "script" not in table or not isinstance(table["args"], list):
            raise UsageError(
                f"invalid args in {name}: args must be a list, and the file must also name a script. "
                'Use for example script = "train.py" and args = ["--lr", "0.1"].',
                code=Code.CONFIG_FILE_INVALID,
            )
        words.extend(_scalar(name, "args", each) for each in table["args"])
    for key, value in table.items():
        if key in ("script", "args"):
            continue
        spelling = "--" + key.replace("_", "-")
        option = BY_SPELLING.get(spelling)
        if option is None or option.reach < Reach.FILE:
            raise UsageError(_unknown_key(name, key, option), code=Code.UNKNOWN_OPTION)
        if option.dest in settings:
            raise UsageError(
                f"duplicate key {key} in {name}: {settings[option.dest][0]} sets the same option. Remove one of them.",
                code=Code.CONFIG_FILE_INVALID,
            )
        settings[option.dest] = (key, _file_text(name, key, value, option))
    return ConfigFile(name, settings, tuple(words))


def _unknown_key(name: str, key: str, option: Option | None) -> str:
    if option:
        return f"invalid key {printable(key)} in {name}: a file cannot set it. Use the flag {option.flag}."
    known = [spelling[2:] for spelling, each in BY_SPELLING.items() if each.reach == Reach.FILE] + [
        "script",
        "args",
    ]
    close = nearest(key.replace("_", "-"), known)
    hint = f"Did you mean {close}?" if close else "Keys are the long flags; see ddp-launch --help all."
    return f"unknown key {printable(key)} in {name}. {hint}"


def _file_text(name: str, key: str, value: object, option: Option) -> str:
    if option.is_switch:
        if not isinstance(value, bool):
            raise UsageError(
                f"invalid {key} = {quote(str(value))} in {name}: it is a switch. Use {key} = true or {key} = false.",
                code=Code.CONFIG_FILE_INVALID,
            )
        return str(int(value != negates("--" + key.replace("_", "-"))))
    if isinstance(value, list):
        parts = [_scalar(name, key, each) for each in value]
        doubled = option.metavar.startswith("TEXT")  # a text that may contain a comma
        return ",".join(part.replace(",", ",,") if doubled else part for part in parts)
    if isinstance(value, dict):
        return ",".join(f"{left}={_scalar(name, key, right)}" for left, right in value.items())
    return _scalar(name, key, value)


def _scalar(name: str, key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(
            f"invalid {key} = {quote(str(value))} in {name}: not a string or a number. Use a string or a number.",
            code=Code.CONFIG_FILE_INVALID,
        )
    text = str(value)
    if "\0" in text:
        raise UsageError(
            f"invalid {key} in {name}: it contains a NUL character. Remove the character.",
            code=Code.CONFIG_FILE_INVALID,
        )
    return text
