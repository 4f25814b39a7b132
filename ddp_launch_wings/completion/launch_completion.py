"""The command `ddp-launch completion bash|zsh|fish|tcsh`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddp_launch_wings.completion.scripts import CompletedCommand, Flag, Program, kind_of, script
from launcher import manual
from launcher.settings.arguments import UsageError
from launcher.settings.options import OPTIONS
from launcher.settings.usage import COMMANDS
from launcher.settings.values import printable
from rendezvous.coded_parser import SHELLS
from rendezvous.values.error_codes import Code


def text(words: list[str], _environ: Mapping[str, str], _tell: Callable[[str], None]) -> str:
    if len(words) != 1 or words[0] not in SHELLS:
        given = f", not {' '.join(map(printable, words))}" if words else ""
        raise UsageError(
            f"use ddp-launch completion {'|'.join(SHELLS)}{given}", code=Code.INVALID_COMMAND_LINE
        )
    flags = tuple(
        Flag(
            (*((option.short,) if option.short else ()), *option.spellings),
            option.help,
            not option.is_switch,
            tuple(option.metavar.split("|")) if "|" in option.metavar else (),
            kind_of(option.metavar),
        )
        for option in OPTIONS
    )
    words_of = {"docs": tuple(manual.names())}
    commands = tuple(
        CompletedCommand(
            name,
            effect,
            flags if name in ("doctor", "warm") else (),
            words_of.get(name, tuple(after.split("|")) if after else ()),
        )
        for name, after, effect in COMMANDS
    )
    return script(Program("ddp-launch", flags, commands, runs_script=True), words[0])
