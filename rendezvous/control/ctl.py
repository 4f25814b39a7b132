"""ddpctl: inspect and control jobs, from any machine that can connect to the service."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import _ddp_launch_entry as doors
from rendezvous.control.commands import COMPLETION, DEFAULT_ENDPOINT, EXPLAIN, parser
from rendezvous.control.formats import write
from rendezvous.grpc_io import choose_engine, silence_grpc
from rendezvous.values.contracts import (
    INTERRUPTED,
    INVALID_USAGE,
    NOT_ALLOWED,
    READER_LEFT,
    TRY_AGAIN,
    UNUSABLE,
    VERSION,
    version_in,
    with_releases,
)
from rendezvous.values.error_codes import Code, with_code

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.service import Service


# What an error code means: `ddpctl explain` prints its section of docs/errors.md, which the wheel contains.

_INSTALLED = Path(__file__).parents[2]
_WIDTH = 80


def page() -> str:
    """The text of all sections: from the installed manual, or from the docs/ of a checkout."""
    manual = _INSTALLED / "launcher" / "pages"
    folder = manual if manual.is_dir() else _INSTALLED / "docs"
    return (folder / "errors.md").read_text(encoding="utf-8")


def explanation(word: str) -> str | None:
    """The text of a code, written as DDP-1001, ddp-1001 or 1001; None if there is no such code."""
    name = word.strip().strip("[]").upper()
    code = name if name.startswith("DDP-") else f"DDP-{name}"
    found = re.search(rf"^### ({re.escape(code)}: .*?)(?=^##|\Z)", page(), re.MULTILINE | re.DOTALL)
    return _for_terminals(found[1]) if found else None


def contents() -> str:
    """All codes, a line each."""
    lines = []
    for level, title in re.findall(r"^(###?) (.*)", page(), re.MULTILINE):
        lines.append(f"{title}:" if level == "##" else "  " + title.replace(": ", "  ", 1))
    return "\n".join((*lines, "`ddpctl explain CODE` explains one."))


def _for_terminals(section: str) -> str:
    section = re.sub(r"\[[\w-]+\]\(([\w-]+)\.md\)", r"ddp-launch docs \1", section)
    section = section.replace("\n\n- ", "\n\nWhat to do:\n- ", 1).rstrip("\n")
    return "\n".join(map(_filled, re.sub(r"(?<=\S)\n *(?=[^\s-]|--)", " ", section).split("\n")))


def _filled(line: str) -> str:
    return fill(line, _WIDTH, subsequent_indent="  " if line.startswith("- ") else "")


_JOBS = "ddpctl --timeout 2 list --all 2>/dev/null | awk 'NR > 1 {print $1}'"
_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser(words).parse_args(words)
        if "carry_out" in arguments:  # of a wing
            code: int = arguments.carry_out(arguments)
            return code
        if arguments.command == COMPLETION:
            write(doors.find(doors.COMPLETION, "argparse")(parser(), arguments.shell, _JOBS))
            return 0
        if arguments.command == EXPLAIN:
            return _explain_code(arguments.code)
        return _ask(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except doors.WingMissing as error:
        return _failed(str(error), INVALID_USAGE, Code.PACKAGE_MISSING)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter reports an error at exit
        if isinstance(error, BrokenPipeError):  # the reader closed the pipe
            return READER_LEFT
        words = f"{error.filename or 'cannot write to standard output'}: {error.strerror}"
        return _failed(words, _FAILED, Code.FILE_UNREADABLE if error.filename else Code.CANNOT_WRITE_OUTPUT)


def _explain_code(word: str) -> int:

    text = explanation(word) if word else contents()
    if text is None:
        words = f"{word!r} is not an error code. Run `ddpctl explain` for the list"
        return _failed(words, INVALID_USAGE, Code.UNKNOWN_CODE)
    write(text)
    return 0


def _ask(arguments: argparse.Namespace) -> int:
    choose_engine()
    silence_grpc()
    import grpc

    from rendezvous.client.credential_files import OptionsUnusable, client_options
    from rendezvous.control.ctl_calls import carry_out
    from rendezvous.control.service import BadArgument, NoSuchJob, Service, endpoints

    try:
        _check(arguments)
        where = arguments.rendezvous or DEFAULT_ENDPOINT
        finds_local = not arguments.rendezvous
        options = client_options(os.environ)
        service = Service(
            endpoints(where), options, arguments.timeout, finds_local=finds_local, log_dir=arguments.log_dir
        )
    except OptionsUnusable as error:
        return _failed(str(error), INVALID_USAGE, error.code)
    try:
        return asyncio.run(carry_out(service, arguments))
    except OptionsUnusable as error:  # of a connection: a certificate that cannot be read
        return _failed(str(error), UNUSABLE, error.code)
    except BadArgument as error:
        return _failed(str(error), INVALID_USAGE, error.code)
    except NoSuchJob as error:
        return _failed(str(error), _FAILED, error.code)
    except grpc.RpcError as error:
        if words := _tls_problem(error, service):
            return _failed(words, NOT_ALLOWED, Code.TLS_FAILED)
        words, exit_code, code = _explain(error, where)
        if finds_local and code is Code.SERVICE_UNREACHABLE:
            words = f"{_local_jobs(arguments)}, and {words}"
        return _failed(words, exit_code, code)


def _local_jobs(arguments: argparse.Namespace) -> str:
    """What was looked for on this machine first."""
    from rendezvous import local

    wanted, jobs = getattr(arguments, "job", ""), local.names()
    if not jobs and not wanted:
        return "no job of yours runs on this machine"
    what = f"the job {wanted!r} is none of your jobs" if wanted else "no answer from your jobs"
    return (
        f"{what} on this machine ({', '.join(jobs[:8]) or '`ddpctl list --all` has those that have ended'})"
    )


def _check(arguments: argparse.Namespace) -> None:
    from rendezvous.client.credential_files import OptionsUnusable

    if not 0 < arguments.timeout < 1e6:
        raise OptionsUnusable(
            f"invalid --timeout {arguments.timeout:g}: use a number of seconds above 0",
            code=Code.INVALID_VALUE,
        )
    for value in map(str, vars(arguments).values()):
        if not value.isprintable():  # also finds bytes that are not UTF-8
            raise OptionsUnusable(
                f"invalid argument {value!r}: remove the control characters", code=Code.INVALID_VALUE
            )


def _tls_problem(error: Any, service: Service) -> str:
    """The results of the TLS probe if every endpoint has a TLS problem, else empty."""
    import grpc

    from rendezvous.client.channel import probe_tls

    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ""

    async def probe_all() -> list[str]:
        return [await probe_tls(endpoint, service.options) for endpoint in service.endpoints]

    words = asyncio.run(probe_all())
    return "; ".join(dict.fromkeys(words)) if all(words) else ""


def _explain(error: Any, endpoints: str) -> tuple[str, int, Code]:
    import grpc

    code = error.code()
    from rendezvous.grpc_io import reason_of

    details = reason_of(error)
    match code:
        case grpc.StatusCode.UNAUTHENTICATED:
            return details, NOT_ALLOWED, Code.NOT_AUTHENTICATED
        case grpc.StatusCode.PERMISSION_DENIED:
            return details, NOT_ALLOWED, Code.NOT_PERMITTED
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
            if version_in(error.trailing_metadata()):  # the service itself has answered
                return details, TRY_AGAIN, Code.SERVICE_FAILED
            return (
                f"no answer from {endpoints}: {details}. Check --rendezvous, and that the service or the job runs",
                TRY_AGAIN,
                Code.SERVICE_UNREACHABLE,
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            service = version_in(error.trailing_metadata())
            words = f"the service at {endpoints} does not support this command"
            return with_releases(words, service, VERSION), _FAILED, Code.NOT_SUPPORTED_BY_SERVICE
        case grpc.StatusCode.NOT_FOUND:
            lacks_job = details.startswith("job ") and "' does not exist" in details
            return details, _FAILED, Code.NO_SUCH_JOB if lacks_job else Code.NOT_FOUND
        case grpc.StatusCode.FAILED_PRECONDITION:
            return details, _FAILED, Code.NOT_POSSIBLE_NOW
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return details, _FAILED, Code.LIMIT_REACHED
        case grpc.StatusCode.INVALID_ARGUMENT:
            return details, _FAILED, Code.REQUEST_INVALID
        case _:
            return details, _FAILED, Code.SERVICE_FAILED


def _failed(words: str, exit_code: int, code: Code) -> int:
    sys.stderr.write(f"ddpctl: {with_code(words, code)}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
