"""The commands of ddpctl, and the arguments that each takes."""

from __future__ import annotations

import argparse
import os
from enum import StrEnum
from typing import Literal

from rendezvous.submit.command import add as add_submit
from rendezvous.values.version import VERSION
from rendezvous.values.wire_names import PORT

_ENDPOINT_ENV = "DDP_RENDEZVOUS"
_DEFAULT = f"127.0.0.1:{PORT}"
_ABOUT = "ddpctl: inspect and control jobs, from any machine that can connect to the service."


class Command(StrEnum):
    """The commands that call the service."""

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


# These change the job; the others only read its state.
Order = Literal[Command.DRAIN, Command.RESUME, Command.RESIZE, Command.RESTART, Command.ABORT]

SUBMIT = "submit"  # does not call the service

_HELP = {
    Command.LIST: "list all jobs",
    Command.STATUS: "show one job: its nodes, its decisions, and how it ended",
    Command.GET: "show one job as JSON",
    Command.EVENTS: "print the past events of a job, as far as the service has kept them",
    Command.WATCH: "print past events of a job, and new ones until it ends",
    Command.DRAIN: "stop using a node for a job, until `ddpctl resume`",
    Command.RESUME: "end the drain or exclusion of a node",
    Command.RESIZE: "change the number of nodes of a job",
    Command.RESTART: "stop all ranks of a job and start them again; does not count against the restart budget",
    Command.ABORT: "end a job",
}
_SUBMIT_HELP = (
    "render a job file for Kubernetes, Slurm or plain machines, and submit it with kubectl, sbatch or ssh"
)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ddpctl", description=_ABOUT, parents=[_shared()])
    found.set_defaults(rendezvous=os.environ.get(_ENDPOINT_ENV, _DEFAULT), output="text", timeout=10.0)
    found.add_argument("--version", action="version", version=f"ddpctl {VERSION}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = _shared()
    added = {each: commands.add_parser(each.value, help=_HELP[each], parents=[shared]) for each in Command}
    for each, command in added.items():
        if each is not Command.LIST:
            command.add_argument("job", help="the job id, as in `ddpctl list`")
    for each in (Command.DRAIN, Command.RESUME):
        added[each].add_argument("node", help="the name of the node, as in `ddpctl status`")
    added[Command.RESIZE].add_argument("nodes", help="the number of nodes: N, or MIN:MAX for an elastic job")
    for each in (Command.DRAIN, Command.RESTART, Command.ABORT):
        added[each].add_argument(
            "--reason", default="", help="a reason, shown in the status and the events of the job"
        )
    add_submit(commands.add_parser(SUBMIT, help=_SUBMIT_HELP))
    return found


def _shared() -> argparse.ArgumentParser:
    """Options accepted before and after the command. The main parser has their defaults."""
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument(
        "--rendezvous",
        metavar="HOST:PORT[,...]",
        help=f"address of the service [{_ENDPOINT_ENV}; default: {_DEFAULT}]",
    )
    shared.add_argument("-o", "--output", choices=["text", "json"], help="output format (default: text)")
    shared.add_argument("--timeout", type=float, metavar="SECONDS", help="timeout of each call (default: 10)")
    return shared
