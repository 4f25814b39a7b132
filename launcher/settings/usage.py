"""Build the output of `--help`, `--help all` and `--print-config` from the table of options."""

from __future__ import annotations

import re
from textwrap import fill, wrap
from typing import TYPE_CHECKING

from launcher.settings.options import BY_SPELLING, GROUPS, OPTIONS
from launcher.settings.values import Option, printable

if TYPE_CHECKING:
    from launcher.settings.config import Settings

_COLUMN, _INSET = 30, " " * 6
# What people use first; the table of options has the rest.
_COMMON = (
    "--nproc-per-node",
    "--nnodes",
    "--hosts",
    "--rendezvous",
    "--secret-file",
    "--module",
    "--max-restarts",
    "--hang-timeout",
    "--log-dir",
    "--debug",
    "--config",
    "--print-config",
)
# The commands that do not start a job: the first word, what may follow it, and what it does.
COMMANDS = (
    ("doctor", "", "check this machine, or with --nnodes all machines of a job"),
    ("docs", "[PAGE]", "list the pages of the manual, or show one"),
    ("warm", "start|stop|status", "keep warm processes for jobs that start later"),
    ("plan", "", "predict how a script would run on more nodes"),
    ("rehearse", "", "play failures in short runs of a script, and compare"),
    ("completion", "bash|zsh|fish|tcsh", "print a script for your shell that completes commands"),
)
_EXAMPLES = (
    ("ddp-launch train.py --lr 0.1", "one rank per GPU of this machine"),
    (
        "ddp-launch --nproc-per-node 4 --max-restarts 3 --log-dir logs train.py",
        "4 ranks; after a failure they restart, at most 3 times; the logs stay in logs/",
    ),
    (
        "ddp-launch --hosts node1,node2 train.py",
        "two machines over ssh, from one command; with --nnodes 2 and --rendezvous instead, run the command on both",
    ),
)
_USAGE = """\
usage: ddp-launch [options] script.py [args ...]
       ddp-launch [options] -m module [args ...]
       ddp-launch [options] --no-python program [args ...]
       ddp-launch doctor [--json] [options]
       ddp-launch warm start|stop|status [options] [script.py ...]
       ddp-launch plan [options] script.py [args ...]
       ddp-launch docs [PAGE]
"""
_SUMMARY = (
    "Starts a data-parallel PyTorch job, monitors its ranks, and restarts them after a failure. Without options, the "
    "job uses all devices of this node. Put options before the script; all words after the script are its arguments."
)
_MORE = (
    ("ddp-launch --help all", "all options, the sources of options, and exit codes"),
    ("ddp-launch docs options", "the same options in the manual"),
    ("ddpctl --help", "the command that inspects and controls jobs"),
)
_WHAT_IT_DOES = (
    f"{_SUMMARY} With --nnodes, run the command on each node: each command starts the ranks of its node. `ddp-launch "
    "doctor` does not start a job: it checks whether this node can run one. With --nnodes, it also checks the network "
    "between the nodes. `ddp-launch warm` turns a pool on from which the next job starts without importing torch. "
    "`ddp-launch docs` lists the pages of the manual."
)
_SOURCES = (
    "flag: --max-restarts 3",
    "variable: DDP_LAUNCH_MAX_RESTARTS=3, or torchrun's variable PET_MAX_RESTARTS if torchrun has one; a switch is "
    "1 or 0; an empty variable counts as unset",
    'file of --config: max-restarts = "5/1h"; the file can also set script = "train.py" and args = ["--lr", "0.1"]',
)
_PRECEDENCE = (
    "A flag overrides a variable, a variable overrides the file, and the file overrides the default."
)
_OTHER = (
    "PYTHON_EXEC sets the Python interpreter of the ranks. TIME is a number of seconds or has a unit: 500ms, 30s, "
    "5m, 1h."
)
_EXIT_CODES = (
    ("0", "every rank succeeded"),
    (
        "N",
        "the first rank that failed exited with N; 128+S if signal S killed it, or if signal S stopped ddp-launch",
    ),
    ("2", "an option, an environment variable or the --config file is invalid; nothing was started"),
    ("71", "this node cannot run a rank (a limit on processes or open files, a failed pre-flight check)"),
    ("75", "the rendezvous service is unreachable, or this node could not start its ranks; try again later"),
    ("77", "the rendezvous service rejected this node"),
    ("78", "the nodes have different options for the job, or an option or a credential cannot be used"),
    ("124", "the ranks made no progress (--hang-timeout, or a group's timeout), and no restarts were left"),
    ("143", "an operator ended the job (ddpctl abort), or SIGTERM stopped ddp-launch"),
)


def short_help_text(width: int = 80) -> str:
    """The answer to `--help`: examples, and the options that most people need."""
    lines = [_USAGE.partition("\n")[0], "", fill(_SUMMARY, width, break_on_hyphens=False), "", "Examples:"]
    for command, effect in _EXAMPLES:
        lines += [f"  {command}", *wrap(effect, width, initial_indent=_INSET, subsequent_indent=_INSET)]
    lines += ["", f"Common options (`ddp-launch --help all` has all {len(OPTIONS)}):"]
    for option in map(BY_SPELLING.__getitem__, _COMMON):
        lines += _row(_names(option), _brief(option), width)
    lines += ["", "Other commands:"]
    for name, words, effect in COMMANDS:
        lines += _row(f"{name} {words}".rstrip(), effect, width)
    lines += ["", "More help:"]
    for command, effect in _MORE:
        lines += _row(command, effect, width)
    return "\n".join(lines)


def _brief(option: Option) -> str:
    """The first clause of its description. The rest explains its values."""
    return _with_default(option, re.split(r"[;:.] | \(default", option.help)[0])


def help_text(width: int = 80) -> str:
    """The answer to `--help all`: every option."""
    lines = [_USAGE, fill(_WHAT_IT_DOES, width, break_on_hyphens=False), ""]
    for title, options in GROUPS:
        lines.append(f"{title}:")
        for option in options:
            lines += _row(_names(option), _about(option), width)
        lines.append("")
    lines += ["Sources of options:", *(_paragraph(f"- {source}", width, "    ") for source in _SOURCES)]
    lines += [_paragraph(_PRECEDENCE, width), _paragraph(_OTHER, width)]
    lines += ["", "Exit codes:"]
    for code, meaning in _EXIT_CODES:
        lines += _row(code, meaning, width, column=8)
    return "\n".join(lines)


def _paragraph(text: str, width: int, indent: str = "  ") -> str:
    return fill(text, width, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False)


def _names(option: Option) -> str:
    short = f"{option.short}, " if option.short else ""
    name = f"--[no-]{option.flag[2:]}" if option.negatable else option.flag
    return short + name + (f" {option.metavar}" if option.metavar else "")


def _about(option: Option) -> str:
    if option.is_switch:
        return option.help + (" (default: on)" if option.default == "1" else "")
    return _with_default(option, option.help)


def _with_default(option: Option, text: str) -> str:
    known = option.default is not None and not option.is_switch
    return f"{text} (default: {(option.default or '').rstrip()})" if known else text


def _row(left: str, right: str, width: int, column: int = _COLUMN) -> list[str]:
    lines = wrap(right, max(width - column, 30), break_on_hyphens=False)
    if len(left) + 4 > column:
        return [f"  {left}", *(" " * column + line for line in lines)]
    return [f"  {left}".ljust(column) + lines[0], *(" " * column + line for line in lines[1:])]


def print_config_text(settings: Settings, words: tuple[str, ...], source: str) -> str:
    """One aligned line per option: name, value, source."""
    rows = [(option.flag[2:], *_value(settings, option)) for option in OPTIONS if option.reach]
    if words:
        rows.append(("script", printable(words[0]), source))
        rows.append(("args", " ".join(printable(word) for word in words[1:]) or "-", source))
    names, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join(f"{row[0]:{names}}  {row[1]:{values}}  {row[2]}".rstrip() for row in rows)


def _value(settings: Settings, option: Option) -> tuple[str, str]:
    setting = settings.of(option.dest)
    if setting.text is None:
        return "-", "default"
    text = ("off", "on")[setting.value] if option.is_switch else printable(setting.text)
    return text, setting.origin.place
