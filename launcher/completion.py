"""The command `ddp-launch completion bash|zsh|fish`."""

from __future__ import annotations

from launcher import manual
from launcher.settings.arguments import UsageError
from launcher.settings.options import OPTIONS
from launcher.settings.values import printable
from rendezvous.completion import SHELLS, Command, Flag, Program, kind_of, script


def text(words: tuple[str, ...]) -> str:
    if len(words) != 1 or words[0] not in SHELLS:
        given = f", not {' '.join(map(printable, words))}" if words else ""
        raise UsageError(f"use ddp-launch completion {'|'.join(SHELLS)}{given}")
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
    commands = (
        Command("doctor", "check this machine, or all machines of a job", flags),
        Command("docs", "show a page of the manual", words=tuple(manual.names())),
        Command("warm", "keep warm processes for jobs that start later", flags, ("start", "stop", "status")),
        Command("completion", "print a script for your shell that completes commands", words=SHELLS),
    )
    return script(Program("ddp-launch", flags, commands, runs_script=True), words[0])
