"""Completion of command lines in bash, zsh, fish and tcsh, from a description of the commands and their options.

The script that a shell loads contains all words, so that completion starts no program. One exception: `jobs`, a command
that prints the ids of jobs, where a job is expected.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FILES, DIRECTORIES = "files", "directories"


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    help: str = ""
    takes_value: bool = False
    values: tuple[str, ...] = ()
    kind: str = ""  # of the value: FILES, DIRECTORIES, or "" for something else


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    name: str
    help: str = ""
    flags: tuple[Flag, ...] = ()
    words: tuple[str, ...] = ()  # that may follow the name
    takes_job: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    flags: tuple[Flag, ...]
    commands: tuple[CompletedCommand, ...]
    jobs: str = ""  # prints the ids of jobs
    runs_script: bool = False  # any other word is a script; what follows belongs to it


def script(program: Program, shell: str) -> str:
    return {"bash": _bash, "zsh": _zsh, "fish": _fish, "tcsh": _tcsh}[shell](program)


# --- from argparse ---------------------------------------------------------------------------------------


def script_of(parser: argparse.ArgumentParser, shell: str, jobs: str = "") -> str:
    """The door `ddp_launch.completion`, for commands whose options are those of argparse."""
    return script(of_parser(parser, jobs), shell)


def of_parser(parser: argparse.ArgumentParser, jobs: str = "") -> Program:
    commands = []
    for action in parser._actions:
        if isinstance(action.choices, dict):
            helps = {each.dest: each.help or "" for each in action._get_subactions()}  # type: ignore[attr-defined]
            commands = [_command(name, sub, helps.get(name, "")) for name, sub in action.choices.items()]
    return Program(parser.prog, _flags(parser), tuple(commands), jobs)


def _command(name: str, parser: Any, help_text: str) -> CompletedCommand:
    positional = [each for each in parser._actions if not each.option_strings]
    words = tuple(str(word) for each in positional for word in each.choices or ())
    return CompletedCommand(
        name, help_text, _flags(parser), words, any(each.dest == "job" for each in positional)
    )


def _flags(parser: argparse.ArgumentParser) -> tuple[Flag, ...]:
    return tuple(
        Flag(
            tuple(each.option_strings),
            " ".join((each.help or "").split()),
            each.nargs != 0,
            tuple(map(str, each.choices or ())),
            kind_of(str(each.metavar or "")),
        )
        for each in parser._actions
        if each.option_strings
    )


def kind_of(metavar: str) -> str:
    """What a value is, by its name in the help."""
    return {"FILE": FILES, "PATH": FILES, "DIR": DIRECTORIES, "FOLDER": DIRECTORIES}.get(metavar, "")


# --- bash ------------------------------------------------------------------------------------------------


def _bash(program: Program) -> str:
    name = program.name
    lines = [
        f"# bash completion of {name}: source <({name} completion bash)",
        f"{_function(name)}() {{",
        *_walk(program, "${COMP_WORDS[@]:1:COMP_CWORD-1}"),
        '    local current="${COMP_WORDS[COMP_CWORD]}"',
        "    COMPREPLY=()",
        '    case "$command $waiting" in',
    ]
    for condition, flag in _valued(program):
        lines.append(f"        {condition}) {_bash_value(flag)} return ;;")
    lines += ["    esac", '    [ -n "$script" ] && return', '    case "$command" in']
    for command_name, words, takes_job in _choices(program):
        jobs = f" $({program.jobs})" if takes_job and program.jobs else ""
        extra = f'"{" ".join(words)}{jobs}"' if jobs else f"'{' '.join(words)}'"
        lines.append(f'        {command_name}) COMPREPLY=($(compgen -W {extra} -- "$current")) ;;')
    lines += ["    esac", "}", f"complete -o bashdefault -o default -F {_function(name)} {name}"]
    return "\n".join(lines)


def _bash_value(flag: Flag) -> str:
    if flag.values:
        return f"COMPREPLY=($(compgen -W '{' '.join(flag.values)}' -- \"$current\"));"
    how = {FILES: "-f", DIRECTORIES: "-d"}.get(flag.kind)
    return (
        f'COMPREPLY=($(compgen {how} -- "$current"));'
        if how
        else "compopt +o default +o bashdefault 2>/dev/null;"
    )


def _walk(program: Program, words: str) -> Iterator[str]:
    """Find the command, the flag whose value is being typed, and the script, in the words before."""
    valued = "|".join(
        name for condition in _all_flags(program) if condition.takes_value for name in condition.names
    )
    commands = "|".join(command.name for command in program.commands) or "-"
    yield '    local command="" waiting="" script="" word'
    yield f'    for word in "{words}"; do'
    yield '        if [ -n "$waiting" ]; then waiting=""; continue; fi'
    yield '        if [ -n "$script" ]; then continue; fi'
    yield '        case "$word" in'
    yield f'            {valued or "--"}) waiting="$word" ;;'
    yield "            -*) ;;"
    others = 'script="$word"' if program.runs_script else ":"
    yield f'            {commands}) if [ -z "$command" ]; then command="$word"; else {others}; fi ;;'
    yield f"            *) {others} ;;"
    yield "        esac"
    yield "    done"


def _all_flags(program: Program) -> Iterator[Flag]:
    yield from program.flags
    for command in program.commands:
        yield from command.flags


def _valued(program: Program) -> Iterator[tuple[str, Flag]]:
    """A pattern of `command flag` for each flag with a value."""
    for command, flags in (("", program.flags), *((each.name, each.flags) for each in program.commands)):
        for flag in flags:
            if flag.takes_value:
                yield "|".join(f'"{command} {name}"' for name in flag.names), flag


def _choices(program: Program) -> Iterator[tuple[str, list[str], bool]]:
    names = [name for flag in program.flags for name in flag.names]
    yield '""', [*(command.name for command in program.commands), *names], False
    for command in program.commands:
        flags = [name for flag in command.flags for name in flag.names]
        yield command.name, [*command.words, *flags], command.takes_job


def _function(name: str) -> str:
    return f"_{name.replace('-', '_')}_completion"


# --- zsh -------------------------------------------------------------------------------------------------


def _zsh(program: Program) -> str:
    name = program.name
    lines = [
        f"#compdef {name}",
        f"# zsh completion of {name}: source <({name} completion zsh)",
        f"{_function(name)}() {{",
        *_walk(program, "${(@)words[2,CURRENT-1]}"),
        "    local -a found",
        '    case "$command $waiting" in',
    ]
    for condition, flag in _valued(program):
        lines.append(f"        {condition}) {_zsh_value(flag)}; return ;;")
    lines += ["    esac", '    if [ -n "$script" ]; then _files; return; fi', '    case "$command" in']
    lines.append(f'        "") {_described([(c.name, c.help) for c in program.commands], program.flags)} ;;')
    for command in program.commands:
        jobs = f" && compadd -- $({program.jobs})" if command.takes_job and program.jobs else ""
        described = _described([(word, "") for word in command.words], command.flags)
        lines.append(f"        {command.name}) {described}{jobs} ;;")
    lines += ["    esac"]
    if program.runs_script:
        lines.append("    _files")
    lines += ["}", f"(( $+functions[compdef] )) && compdef {_function(name)} {name}"]
    return "\n".join(lines)


def _zsh_value(flag: Flag) -> str:
    if flag.values:
        return f"compadd -- {' '.join(map(shlex.quote, flag.values))}"
    return {FILES: "_files", DIRECTORIES: "_files -/"}.get(
        flag.kind, f"_message {shlex.quote(flag.help or 'value')}"
    )


def _described(words: list[tuple[str, str]], flags: tuple[Flag, ...]) -> str:
    rows = [*words, *((name, flag.help) for flag in flags for name in flag.names)]
    texts = [shlex.quote(f"{word.replace(':', chr(92) + ':')}:{_short(text)}") for word, text in rows]
    return f"found=({' '.join(texts)}); _describe -t words word found"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- fish ------------------------------------------------------------------------------------------------


def _fish(program: Program) -> str:
    name = program.name
    lines = [f"# fish completion of {name}: {name} completion fish | source"]
    names = " ".join(command.name for command in program.commands)
    before = f"not __fish_seen_subcommand_from {names}" if names else ""
    if not program.runs_script:
        lines.append(f"complete -c {name} -f")
    lines += [_fish_line(name, before, ["-a", command.name], command.help) for command in program.commands]
    lines += [_fish_flag(name, before, flag) for flag in program.flags]
    for command in program.commands:
        inside = f"__fish_seen_subcommand_from {command.name}"
        lines += [_fish_line(name, inside, ["-a", word], "") for word in command.words]
        if command.takes_job and program.jobs:
            lines.append(_fish_line(name, inside, ["-a", f"({program.jobs})"], "job"))
        lines += [_fish_flag(name, inside, flag) for flag in command.flags]
    return "\n".join(lines)


def _fish_flag(program: str, condition: str, flag: Flag) -> str:
    words: list[str] = []
    for name in flag.names:
        words += (
            ["-l", name[2:]]
            if name.startswith("--")
            else ["-s", name[1:]]
            if len(name) == 2
            else ["-o", name[1:]]
        )
    if flag.values:
        words += ["-x", "-a", " ".join(flag.values)]
    elif flag.takes_value:
        words += {FILES: ["-r", "-F"], DIRECTORIES: ["-x", "-a", "(__fish_complete_directories)"]}.get(
            flag.kind, ["-x"]
        )
    return _fish_line(program, condition, words, flag.help)


def _fish_line(program: str, condition: str, words: list[str], text: str) -> str:
    line = ["complete", "-c", program, *(["-n", condition] if condition else []), *words]
    return shlex.join([*line, *(["-d", _short(text)] if text else [])])


# --- tcsh ------------------------------------------------------------------------------------------------
#
# A rule of tcsh sees the word before and the word itself, not the command. So it offers the options of all commands.


def _tcsh(program: Program) -> str:
    rules = [_tcsh_value(flag) for _, flag in _valued(program)]
    for command in program.commands:
        words = f"({' '.join(command.words)})" if command.words else ""
        jobs = f"`sh -c {shlex.quote(program.jobs)}`" if command.takes_job and program.jobs else ""
        if words or jobs:
            rules.append(f"n@{command.name}@{words or jobs}@")
    names = {name[2:]: None for flag in _all_flags(program) for name in flag.names if name.startswith("--")}
    rules.append(f"c@--@({' '.join(names)})@")
    if program.commands:
        rules.append(f"p@1@({' '.join(command.name for command in program.commands)})@")
    rules.append("p@*@f@")
    lines = [
        f"# tcsh completion of {program.name}: {program.name} completion tcsh > FILE; source FILE",
        f"complete {program.name} \\",
    ]
    return "\n".join([*lines, " \\\n".join(f"    {shlex.quote(rule)}" for rule in dict.fromkeys(rules))])


def _tcsh_value(flag: Flag) -> str:
    what = (
        f"({' '.join(flag.values)})"
        if flag.values
        else {FILES: "f", DIRECTORIES: "d"}.get(flag.kind, "x:value")
    )
    before = flag.names[0] if len(flag.names) == 1 else "{" + ",".join(flag.names) + "}"
    return f"n@{before}@{what}@"
