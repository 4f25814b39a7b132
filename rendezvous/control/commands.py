"""The commands of ddpctl, and the arguments that each takes."""

from __future__ import annotations

import argparse
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

import _ddp_launch_entry as doors
from rendezvous.coded_parser import CodedParser, add_completion
from rendezvous.control.formats import add_output
from rendezvous.control.top_table import COLUMNS
from rendezvous.values.contracts import PORT, VERSION
from rendezvous.values.durations import seconds_in

_ENDPOINT_ENV = "DDP_RENDEZVOUS"
DEFAULT_ENDPOINT = f"127.0.0.1:{PORT}"
_ABOUT = "Inspects and controls jobs, from any machine that can connect to the service."
_EXAMPLES = """\
examples:
  ddpctl list --all
      all jobs of the service and yours on this machine, also the finished ones
  ddpctl top
      what each rank of the running job does, live
  ddpctl --rendezvous node1:29400 why my-job
      the last failure of a job: its cause, and how long the restart took
"""
_COMMANDS = "commands (ddpctl COMMAND --help has the options of one)"
TAIL = 20


class Command(StrEnum):
    """The commands that call the service."""

    LIST = "list"
    STATUS = "status"
    TOP = "top"
    LOGS = "logs"
    STACKS = "stacks"
    WHY = "why"
    CHECKPOINT = "checkpoint"
    PROFILE = "profile"
    DRILL = "drill"
    GET = "get"
    EVENTS = "events"
    WATCH = "watch"
    DRAIN = "drain"
    RESUME = "resume"
    RESIZE = "resize"
    RESTART = "restart"
    ABORT = "abort"


# These change the job; the others only read its state.
Order = Literal[Command.DRAIN, Command.RESUME, Command.RESIZE, Command.RESTART, Command.ABORT]

# These do not call the service.
COMPLETION, EXPLAIN = "completion", "explain"
ALIASES = {"jobs": Command.LIST}

# They need a job that runs. For the others, the default may be the job that ended last.
_ONLY_RUNNING = (
    *(Command.TOP, Command.STACKS, Command.CHECKPOINT, Command.PROFILE, Command.DRILL),
    *(Command.DRAIN, Command.RESUME, Command.RESIZE, Command.RESTART, Command.ABORT),
)

_HELP = {
    Command.LIST: "list the jobs that have not ended; with --all, the others too",
    Command.STATUS: "show one job: its nodes, its decisions, and how it ended",
    Command.TOP: "show what each rank does, live: phase, step, speed, communication, memory",
    Command.LOGS: "print the output of the ranks, from the log files of all nodes",
    Command.STACKS: "print the stacks of a rank as they are now",
    Command.WHY: "tell the last failure: its cause and evidence, what was decided, and how long the restart took",
    Command.CHECKPOINT: "ask all ranks for a checkpoint, and wait until they have taken it",
    Command.PROFILE: "record the steps of a rank with torch's profiler, as a trace for Perfetto",
    Command.DRILL: "kill or freeze a rank, to rehearse; only if the job was started with --allow-drill",
    Command.GET: "show one job as JSON",
    Command.EVENTS: "print the past events of a job, as far as the service has kept them",
    Command.WATCH: "print past events of a job, and new ones until it ends",
    Command.DRAIN: "stop using a node for a job, until `ddpctl resume`",
    Command.RESUME: "end the drain or exclusion of a node",
    Command.RESIZE: "change the number of nodes of a job",
    Command.RESTART: "stop all ranks of a job and start them again; does not count against the restart budget",
    Command.ABORT: "end a job",
}


def _aliases_of(command: Command) -> list[str]:
    return [name for name, of in ALIASES.items() if of is command]


def command_of(arguments: argparse.Namespace) -> Command:
    return ALIASES.get(arguments.command) or Command(arguments.command)


class CommandOfAWing(Protocol):
    """The door `ddp_launch.ctl_command`: a module, which is imported only if its command is asked for, or help is."""

    HELP: str

    def add(self, parser: argparse.ArgumentParser, /) -> None: ...

    def carry_out(self, arguments: argparse.Namespace, /) -> int:
        """Return the exit code."""


class _Parser(CodedParser):
    """`missing`: why the wing of this command cannot be used."""

    def __init__(self, *args: Any, missing: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._missing = missing

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._missing:
            raise doors.WingMissing(self._missing)
        return super().parse_known_args(args, namespace)


def parser(words: Sequence[str] = ()) -> CodedParser:
    found = _Parser(
        "ddpctl",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_shared()],
    )
    found.set_defaults(rendezvous=os.environ.get(_ENDPOINT_ENV), output="text", timeout=10.0, log_dir="")
    found.add_argument("--version", action="version", version=f"ddpctl {VERSION}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND", title=_COMMANDS)
    shared = _shared()
    added = {
        each: commands.add_parser(each.value, help=_HELP[each], parents=[shared], aliases=_aliases_of(each))
        for each in Command
    }
    for each, command in added.items():
        if each is Command.LIST:
            command.add_argument("--all", action="store_true", help="also the jobs that have ended")
            continue
        default = "the only running job" + ("" if each in _ONLY_RUNNING else ", else the one that ended last")
        command.add_argument("job", nargs="?", default="", help=f"the job id; default: {default}")
    for each in (Command.DRAIN, Command.RESUME):
        added[each].add_argument("node", help="the name of the node, as in `ddpctl status`")
    added[Command.RESIZE].add_argument(
        "nodes", type=nodes, help="the number of nodes: N, or MIN:MAX for an elastic job"
    )
    for each in (Command.DRAIN, Command.RESTART, Command.ABORT, Command.DRILL):
        added[each].add_argument(
            "--reason",
            default="",
            metavar="TEXT",
            help="a reason, shown in the status and the events of the job",
        )
    _add_top(added[Command.TOP])
    _add_logs(added[Command.LOGS])
    _add_stacks(added[Command.STACKS])
    _add_why(added[Command.WHY])
    _add_checkpoint(added[Command.CHECKPOINT])
    _add_profile(added[Command.PROFILE])
    _add_drill(added[Command.DRILL])
    add_completion(commands)
    explain = commands.add_parser(EXPLAIN, help="explain an error code, such as DDP-5004; needs no service")
    explain.add_argument("code", nargs="?", default="", help="the code; without it, the list of all codes")
    _add_wings(commands, words)
    return found


def _add_wings(commands: Any, words: Sequence[str]) -> None:
    """All of them, unless the words have a command of ours."""
    has_ours = not {*Command, *ALIASES, COMPLETION, EXPLAIN}.isdisjoint(words)
    found = doors.names(doors.CTL_COMMAND)
    for name, value in (found if has_ours else found | doors.others(doors.CTL_COMMAND)).items():
        if has_ours and name not in words:
            continue
        try:
            wing: CommandOfAWing = doors.load(doors.CTL_COMMAND, name, value)
        except doors.WingMissing as error:
            commands.add_parser(name, help="not installed", missing=str(error))
        else:
            command = commands.add_parser(name, help=wing.HELP)
            command.set_defaults(carry_out=wing.carry_out)
            wing.add(command)


def _add_top(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sort",
        choices=COLUMNS,
        default="rank",
        metavar="COLUMN",
        help=f"the column to sort by: {', '.join(COLUMNS)} (default: rank)",
    )
    command.add_argument("--reverse", action="store_true", help="sort in descending order")
    command.add_argument(
        "--once", action="store_true", help="print one table and exit, as without a terminal"
    )
    command.add_argument(
        "--interval", type=seconds, default=1.0, metavar="TIME", help="between updates (default: 1s)"
    )


def _add_logs(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("-f", "--follow", action="store_true", help="print new output until the job ends")
    add("--rank", type=ranks, default=(), metavar="RANKS", help="only these ranks, for example 0,4-7")
    add(
        "--generation",
        type=generation,
        default=0,
        metavar="N",
        help="only this start of the ranks (default: the latest; with --since: all)",
    )
    add(
        "--since",
        type=duration,
        metavar="TIME",
        help="only what was written in this time, for example 90s, 5m or 2h",
    )
    add(
        "--tail",
        type=lines,
        metavar="LINES",
        help=f"without --since: the last lines of each stream of each rank, or all (default: {TAIL})",
    )
    add(
        "--grep",
        type=pattern,
        metavar="REGEX",
        help="only lines that this regular expression matches; without --tail, --since and --generation: of all output",
    )
    add("--stream", choices=["stdout", "stderr"], default="", help="only this stream (default: both)")
    add("--no-prefix", action="store_true", help="print the lines without node and rank")
    add(
        "--cursor-file",
        default="",
        metavar="FILE",
        help="continue where the last command with this file has ended, and write to it how far this one came",
    )


def _add_stacks(command: argparse.ArgumentParser) -> None:
    command.add_argument("rank", type=rank, help="the global rank")
    command.add_argument(
        "--native", action="store_true", help="also the frames of native code; the rank is stopped meanwhile"
    )


def _add_why(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--generation", type=generation, default=0, metavar="N", help="the start of the ranks that failed"
    )

    command.add_argument(
        "--file",
        default="",
        metavar="PATH",
        help="tell it from a failure.json, or the log folder with it, of a job that no service keeps",
    )


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="a reason, shown to the ranks and in the events of the job",
    )
    command.add_argument(
        "--wait", type=seconds, default=60.0, metavar="TIME", help="for the checkpoint (default: 60s)"
    )


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.add_argument("rank", type=rank, help="the global rank")
    command.add_argument(
        "--seconds", type=seconds, default=5.0, metavar="N", help="how long to record (default: 5)"
    )
    command.add_argument(
        "--out", default="", metavar="FILE", help="the file to write (default: JOB-rankRANK.trace.json.gz)"
    )


def _add_drill(command: argparse.ArgumentParser) -> None:
    command.add_argument("deed", choices=["kill", "freeze"], help="kill: SIGKILL; freeze: SIGSTOP for a time")
    command.add_argument("rank", type=rank, help="the global rank")
    command.add_argument("--for", dest="freeze_s", type=seconds, metavar="TIME", help="frozen (default: 10s)")
    command.add_argument("--yes", action="store_true", help="do not ask; needed without a terminal")


def _shared() -> _Parser:
    """Options accepted before and after the command. The main parser has their defaults."""
    shared = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument(
        "--rendezvous",
        metavar="HOST:PORT[,...]",
        help=f"address of the service [{_ENDPOINT_ENV}; default: {DEFAULT_ENDPOINT}, and your jobs on this machine]",
    )
    shared.add_argument(
        "--log-dir",
        metavar="DIR",
        help="also look for finished jobs here, which is a --log-dir of ddp-launch or the folder of one job",
    )
    add_output(shared)
    shared.add_argument("--timeout", type=float, metavar="SECONDS", help="timeout of each call (default: 10)")
    return shared


# --- argument values --------------------------------------------------------------------------------
#
# The values of ddpctl's arguments. A function raises `argparse.ArgumentTypeError`, whose text argparse shows.

_MOST_RANKS = 1000
_MOST_S = 400 * 86_400.0


def duration(text: str) -> float:
    """A duration in seconds: "90", "90s", "5m", "2h", "1d"."""
    found = seconds_in(text)
    if found is None or found < 0:
        raise ArgumentTypeError(f"{text!r} is not a duration: use a number with s, m, h or d, for example 5m")
    return min(found, _MOST_S)


def ranks(text: str) -> tuple[int, ...]:
    """Ranks: "0,4-7"."""
    found: dict[int, None] = {}
    for word in text.split(","):
        span = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", word.strip(), re.ASCII)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if first > last:
            raise ArgumentTypeError(f"{text!r} is not a list of ranks: use for example 3, or 0,4-7")
        if last - first + len(found) >= _MOST_RANKS:
            raise ArgumentTypeError(
                f"{text!r} names more than {_MOST_RANKS} ranks: name fewer, or omit the option"
            )
        found |= dict.fromkeys(range(first, last + 1))
    return tuple(found)


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def rank(text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII):
        raise ArgumentTypeError(f"{text!r} is not a rank: use a number from 0")
    return int(text)


def lines(text: str) -> int:
    """A number of lines; 0 for "all"."""
    if text == "all":
        return 0
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a number of lines: use a number from 1, or all")
    return int(text)


def generation(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a generation: use a number from 1, as in `ddpctl events`")
    return int(text)


def seconds(text: str) -> float:
    found = duration(text)
    if not 0 < found <= 600:
        raise ArgumentTypeError(f"{text!r}: use a duration above 0, and at most 10m")
    return found


def nodes(text: str) -> tuple[int, int]:
    few, colon, many = text.partition(":")
    if not text.isascii() or not few.isdigit() or (colon and not many.isdigit()) or len(text) > 15:
        raise ArgumentTypeError(f"invalid number of nodes {text!r}: use N or MIN:MAX, for example 4 or 2:8")
    return int(few), int(many or few)
