"""The commands of ddpctl, and the arguments that each takes."""

from __future__ import annotations

import argparse
import os
from enum import StrEnum
from typing import Literal

from rendezvous.submit.command import add as add_submit
from rendezvous.values.wire_names import PORT

_ENDPOINT_ENV = "DDP_RENDEZVOUS"
_DEFAULT = f"127.0.0.1:{PORT}"
_ABOUT = "ddpctl: look at jobs and change them, from any machine that reaches the service."


class Command(StrEnum):
    """What the service is asked for."""

    LIST = "list"
    STATUS = "status"
    GET = "get"
    EVENTS = "events"
    WATCH = "watch"
    DRAIN = "drain"
    RESUME = "resume"
    RESIZE = "resize"
    RESTART = "restart"
    ABORT = "abort"


# These change the job; the others only look at it.
Order = Literal[Command.DRAIN, Command.RESUME, Command.RESIZE, Command.RESTART, Command.ABORT]

SUBMIT = "submit"  # asks no service

_HELP = {
    Command.LIST: "all jobs",
    Command.STATUS: "one job: its nodes, its decisions, how it ended",
    Command.GET: "the same, always as JSON",
    Command.EVENTS: "what has happened to a job, as far as the service remembers",
    Command.WATCH: "the same, and what happens from now on, until the job ends",
    Command.DRAIN: "take a node out of a job until it is resumed",
    Command.RESUME: "let a node take part again",
    Command.RESIZE: "change how many nodes a job may have",
    Command.RESTART: "stop all ranks and start them again; does not count against the restart budget",
    Command.ABORT: "end a job",
}
_SUBMIT_HELP = (
    "render a job file for Kubernetes, Slurm or plain machines, and submit it with kubectl, sbatch or ssh"
)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ddpctl", description=_ABOUT, parents=[_shared()])
    found.set_defaults(rendezvous=os.environ.get(_ENDPOINT_ENV, _DEFAULT), output="text", timeout=10.0)
    commands = found.add_subparsers(dest="command", required=True)
    shared = _shared()
    added = {each: commands.add_parser(each, help=_HELP[each], parents=[shared]) for each in Command}
    for each, command in added.items():
        if each is not Command.LIST:
            command.add_argument("job", help="its id, as `ddpctl list` shows it")
    for each in (Command.DRAIN, Command.RESUME):
        added[each].add_argument("node", help="its name, as `ddpctl status` shows it")
    added[Command.RESIZE].add_argument("nodes", help="N or MIN:MAX")
    for each in (Command.DRAIN, Command.RESTART, Command.ABORT):
        added[each].add_argument("--reason", default="", help="shown to everyone who looks at the job")
    add_submit(commands.add_parser(SUBMIT, help=_SUBMIT_HELP))
    return found


def _shared() -> argparse.ArgumentParser:
    """For before and after the command; what is given in neither place is the main parser's to say."""
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument(
        "--rendezvous",
        metavar="HOST:PORT[,...]",
        help=f"where the service is [{_ENDPOINT_ENV}; default: {_DEFAULT}]",
    )
    shared.add_argument(
        "-o", "--output", choices=["text", "json"], help="for people (default) or for programs"
    )
    shared.add_argument("--timeout", type=float, metavar="SECONDS", help="for each call (default: 10)")
    return shared
