"""ddpctl: look at jobs, and give them orders, from any machine that reaches the service."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

from rendezvous.grpc_io import choose_engine, hush

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.control.ctl_calls import Service

_ENDPOINT_ENV = "DDP_RENDEZVOUS"
_DEFAULT = "127.0.0.1:29400"

_HELP = {
    "list": "all jobs",
    "status": "one job: its nodes, its decisions, how it ended",
    "get": "the same, always as JSON",
    "events": "what has happened to a job, as far as the service remembers",
    "watch": "the same, and what happens from now on, until the job ends",
    "drain": "take a node out of a job until it is resumed",
    "resume": "let a node take part again",
    "resize": "change how many nodes a job may have",
    "restart": "stop all ranks and start them again; costs nothing of the restart budget",
    "abort": "end a job",
}
_SUBMIT = (
    "render a job file for Kubernetes, Slurm or plain machines, and submit it with kubectl, sbatch or ssh"
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "submit":
            from rendezvous.submit.command import carry_out as submit

            return submit(arguments)
        return _ask(arguments)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains at its end
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            return 141
        return _failed(f"{error.filename or 'cannot write to standard output'}: {error.strerror}", 1)


def _ask(arguments: argparse.Namespace) -> int:
    choose_engine()
    hush()
    import grpc

    from rendezvous.access.client_options import OptionsUnusable, client_options
    from rendezvous.control.ctl_calls import Service, carry_out, endpoints

    try:
        _check(arguments)
        service = Service(endpoints(arguments.rendezvous), client_options(os.environ), arguments.timeout)
        return asyncio.run(carry_out(service, arguments))
    except OptionsUnusable as error:
        return _failed(str(error), 78)
    except grpc.RpcError as error:
        words = _misfit(error, service)
        return _failed(words, 77) if words else _failed(*_in_words(error, arguments.rendezvous))


def _check(arguments: argparse.Namespace) -> None:
    from rendezvous.access.client_options import OptionsUnusable

    if not 0 < arguments.timeout < 1e6:
        raise OptionsUnusable(f"--timeout is a number of seconds above 0, not {arguments.timeout:g}")
    words = (str(value) for value in vars(arguments).values())
    if any(not word.isprintable() for word in words):  # bytes that are no UTF-8 among them
        raise OptionsUnusable(
            "an argument holds characters that cannot be printed; job ids and nodes have none"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ddpctl", description=__doc__, parents=[_shared()])
    parser.set_defaults(rendezvous=os.environ.get(_ENDPOINT_ENV, _DEFAULT), output="text", timeout=10.0)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = _shared()
    added = {name: commands.add_parser(name, help=words, parents=[shared]) for name, words in _HELP.items()}
    for name, command in added.items():
        if name != "list":
            command.add_argument("job", help="its id, as `ddpctl list` shows it")
    for name in ("drain", "resume"):
        added[name].add_argument("node", help="its name, as `ddpctl status` shows it")
    added["resize"].add_argument("nodes", help="N or MIN:MAX")
    for name in ("drain", "restart", "abort"):
        added[name].add_argument("--reason", default="", help="shown to everybody")
    from rendezvous.submit.command import add as add_submit

    add_submit(commands.add_parser("submit", help=_SUBMIT))
    return parser


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


def _misfit(error: Any, service: Service) -> str:
    """What gRPC has no words for, where that is what is wrong at every endpoint."""
    import grpc

    from rendezvous.access.misfit import misfit

    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ""

    async def found() -> list[str]:
        return [await misfit(endpoint, service.options) for endpoint in service.endpoints]

    words = asyncio.run(found())
    return "; ".join(dict.fromkeys(words)) if all(words) else ""


def _in_words(error: Any, endpoints: str) -> tuple[str, int]:
    import grpc

    code, details = error.code(), error.details() or "no reason given"
    match code:
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return details, 77
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer from {endpoints}: {details}", 75
        case _:
            return details, 1


def _failed(words: str, code: int) -> int:
    sys.stderr.write(f"ddpctl: {words}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
