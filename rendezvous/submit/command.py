"""The command `ddpctl submit`: reads the job file, shows what it renders, or hands it to kubectl, sbatch or ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

from rendezvous.submit import kubernetes, slurm, ssh
from rendezvous.submit.job_file import BadJobFile, JobFile, read
from rendezvous.submit.yaml_text import documents

if TYPE_CHECKING:
    import argparse

_USAGE, _NO_PROGRAM = 2, 127
_DEFAULT = "ddp.toml"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=["kubernetes", "slurm", "ssh"], required=True)
    parser.add_argument(
        "--file", default=_DEFAULT, metavar="FILE", help=f"the job file (default: {_DEFAULT})"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted, and stop there")
    parser.add_argument("script", nargs="*", metavar="-- SCRIPT ARG", help="instead of the file's script")


def carry_out(arguments: argparse.Namespace) -> int:
    try:
        job = read(_load(arguments.file), arguments.script)
        command, text = _render(job, arguments.target)
    except BadJobFile as error:
        sys.stderr.write(f"ddpctl: {arguments.file}: {error}\n")
        return _USAGE
    if arguments.dry_run:
        sys.stdout.write(text)
        return 0
    if shutil.which(command[0]) is None:
        sys.stderr.write(
            f"ddpctl: {command[0]} is not on PATH; --dry-run shows what would be given to it, to be used elsewhere\n"
        )
        return _NO_PROGRAM
    if arguments.target == "ssh":
        sys.stdout.flush()
        os.execvpe(command[0], command, {**os.environ, **job.env})
    return subprocess.run(command, input=text, text=True, check=False).returncode


def _load(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise BadJobFile("there is no such file; --file names another") from None
    except OSError as error:
        raise BadJobFile(f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadJobFile(f"is no TOML: {error}") from error


def _render(job: JobFile, target: str) -> tuple[list[str], str]:
    """The program that takes it, and what it is given."""
    match target:
        case "kubernetes":
            if not job.image:
                raise BadJobFile('image must be given for Kubernetes; write image = "REPOSITORY/NAME:TAG"')
            return ["kubectl", "create", "-f", "-"], documents(kubernetes.objects(job))
        case "slurm":
            return ["sbatch"], slurm.script(job)
        case _:
            command = ssh.command(job)
            return command, shlex.join(command) + "\n"
