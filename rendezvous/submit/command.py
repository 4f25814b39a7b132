"""The command `ddpctl submit`: read the job file, then print the result or submit it with kubectl, sbatch or ssh."""

from __future__ import annotations

import shutil
import sys
import tomllib
from typing import TYPE_CHECKING

from rendezvous.submit.hand_over import (
    CANNOT,
    NO_PROGRAM,
    PROGRAMS,
    options_problem,
    prerequisites,
    render,
    submit,
)
from rendezvous.submit.job_file import BadJobFile, read
from rendezvous.values.error_codes import Code, with_code

if TYPE_CHECKING:
    import argparse

    from rendezvous.submit.job import JobFile

_USAGE = 2
_DEFAULT = "ddp.toml"
_MOST_BYTES = 2**24


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=list(PROGRAMS), required=True, help="where to run the job")
    parser.add_argument(
        "--file", default=_DEFAULT, metavar="FILE", help=f"the job file (default: {_DEFAULT})"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and exit")
    parser.add_argument("script", nargs="*", metavar="-- SCRIPT ARG", help="replaces the script of the file")


def carry_out(arguments: argparse.Namespace) -> int:
    try:
        return _carry_out(read(_load(arguments.file), arguments.script), arguments)
    except BadJobFile as error:
        _print_error(f"{arguments.file}: {error}", error.code)
        return _USAGE
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except OSError as error:  # a full disk, or too many arguments for a program
        problem = ": ".join(filter(None, (error.filename, error.strerror)))
        _print_error(f"cannot submit the job: {problem}", Code.CANNOT_SUBMIT)
        return CANNOT


def _carry_out(job: JobFile, arguments: argparse.Namespace) -> int:
    text = render(job, arguments.target)
    if words := options_problem(job, arguments.target):
        problem = f"{arguments.file}: ddp-launch rejects the options of the job file:\n{words}"
        _print_error(problem, Code.JOB_FILE_INVALID)
        return _USAGE
    if arguments.dry_run:
        sys.stdout.write(text)
        sys.stdout.flush()
        if words := prerequisites(job, arguments.target):
            sys.stderr.write(f"ddpctl: {words}\n")
        return 0
    program = PROGRAMS[arguments.target]
    if shutil.which(program) is None:
        problem = f"{program} is not on PATH. Install it, or use --dry-run and submit the output elsewhere."
        _print_error(problem, Code.CANNOT_SUBMIT)
        return NO_PROGRAM
    return submit(job, arguments.target)


def _print_error(text: str, code: Code) -> None:
    sys.stderr.write(f"ddpctl: {with_code(text, code)}\n")


def _load(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise BadJobFile("the file does not exist; name the job file with --file") from None
    except OSError as error:
        raise BadJobFile(f"cannot read the file: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise BadJobFile(f"the file is larger than {_MOST_BYTES} bytes, which is the limit: check --file")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadJobFile(f"invalid TOML: {error}") from error
