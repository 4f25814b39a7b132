"""The command `ddpctl submit`: read the job file, then print the result or submit it with kubectl, sbatch or ssh."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from typing import Any

from ddp_launch_wings.submit import kubernetes, slurm, ssh
from ddp_launch_wings.submit.job import BadJobFile, JobFile, read
from ddp_launch_wings.submit.kubernetes import own_secret
from rendezvous.access import secret
from rendezvous.control.formats import documents
from rendezvous.values.contracts import INVALID_USAGE
from rendezvous.values.error_codes import Code, with_code

_DEFAULT = "ddp.toml"
_MOST_BYTES = 2**24


HELP = "render a job file for Kubernetes, Slurm or plain machines, and submit it with kubectl, sbatch or ssh"


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
        return INVALID_USAGE
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
        return INVALID_USAGE
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


# --- submit a job with the user's own kubectl, sbatch or ssh, and with their rights -----------------

NO_PROGRAM, CANNOT = 127, 1
# Server-side apply: it does not leave a copy of a secret in an annotation.
_APPLY = ("apply", "--server-side", "--force-conflicts", "-f", "-")
PROGRAMS = {"kubernetes": "kubectl", "slurm": "sbatch", "ssh": "ddp-launch"}


def render(job: JobFile, target: str) -> str:
    """The text that kubectl or sbatch gets, or the ssh command. Raises `BadJobFile`."""
    match target:
        case "kubernetes":
            return documents(_objects(job))
        case "slurm":
            return slurm.script(job)
        case "ssh":
            return ssh.render(job, _run(job))
        case _:
            raise AssertionError(f"internal error: unknown target {target}")


def submit(job: JobFile, target: str) -> int:
    """Submit the job, and return the exit code. Raises `BadJobFile`."""
    match target:
        case "kubernetes":
            return _to_kubectl(job, _objects(job))
        case "slurm":
            return subprocess.run(["sbatch"], input=slurm.script(job), text=True, check=False).returncode
        case "ssh":
            return _to_ssh(job, ssh.command(job, _run(job)))
        case _:
            raise AssertionError(f"internal error: unknown target {target}")


def _objects(job: JobFile) -> list[kubernetes.Object]:
    if not job.image:
        raise BadJobFile('Kubernetes needs an image; write image = "REPOSITORY/NAME:TAG"')
    return kubernetes.objects(job)


def _run(job: JobFile) -> str:
    return f"{job.name}-{time.strftime('%m%d-%H%M%S')}"


def _to_kubectl(job: JobFile, objects: list[kubernetes.Object]) -> int:
    """Create the job with kubectl. An existing job of that name is an error and is not changed.

    The additional objects of this job (service, network policy, secret) may exist already. They are created after the
    job and deleted with it. The TrainingRuntime is created before its TrainJob, and not overwritten if it exists.
    """
    *after, main = objects
    before = [each for each in after if each["kind"] == "TrainingRuntime"]
    if before and (code := _kubectl(job, ["create", "-f", "-"], before)[0]):
        return code
    code, uid = _kubectl(job, ["create", "-f", "-", "-o", "jsonpath={.metadata.uid}"], [main])
    if code:
        if before:
            _kubectl(job, ["delete", "-f", "-"], before)
        return code
    if name := own_secret(job):
        after.append(_made_secret(job, name))
    for each in after:
        each["metadata"]["ownerReferences"] = [_owner(main, uid)]
    if after and (code := _kubectl(job, _APPLY, after)[0]):
        return code
    name, namespace = f"{main['kind'].lower()}/{job.name}", job.kubernetes.namespace
    known = f"; its job id for ddpctl: {job.name}-{uid}" if main["kind"] == "Job" else ""
    sys.stdout.write(f"{name} created in namespace {namespace}{known}\n")
    return 0


def _made_secret(job: JobFile, name: str) -> kubernetes.Object:
    meta = {"name": name, "namespace": job.kubernetes.namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"secret": secret.make()}}


def _owner(main: kubernetes.Object, uid: str) -> dict[str, Any]:
    found = {each: main[each] for each in ("apiVersion", "kind")}
    return {**found, "name": main["metadata"]["name"], "uid": uid}


def _kubectl(job: JobFile, words: Sequence[str], objects: list[kubernetes.Object]) -> tuple[int, str]:
    context = ["--context", job.kubernetes.context] if job.kubernetes.context else []
    command = ["kubectl", *context, *words]
    done = subprocess.run(command, input=documents(objects), stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.strip()


def _to_ssh(job: JobFile, command: list[str]) -> int:
    if job.workdir:
        try:
            os.chdir(job.workdir)
        except OSError as error:
            raise BadJobFile(
                f"cannot use workdir = {job.workdir!r} on this machine: {error.strerror}. Create it, or change workdir"
            ) from error
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, **job.env})


def prerequisites(job: JobFile, target: str) -> str:
    """The objects that the user must also create if they submit the output themselves; "" if there are none."""
    name = own_secret(job) if target == "kubernetes" else ""
    if not name:
        return ""
    create = (
        f"kubectl -n {job.kubernetes.namespace} create secret generic {name} --from-file=secret=./job-secret"
    )
    return f"to submit this yourself, first create the job's secret: ddp-rendezvous secret ./job-secret && {create}"


def options_problem(job: JobFile, target: str) -> str:
    """The error of ddp-launch about the options of the job file; "" if there is none, or no ddp-launch is installed.

    So a misspelt option is found now, and not in the first pod.
    """
    program = shutil.which(
        "ddp-launch", path=f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
    )
    if program is None:
        return ""
    words = _launch(job, target)
    prefixes = ("DDP_LAUNCH_", "PET_", "SLURM_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    command = [program, "--print-config", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr.strip() if done.returncode == 2 else ""


def _launch(job: JobFile, target: str) -> list[str]:
    if target == "ssh":
        return ssh.command(job, _run(job))[1:]
    endpoint = (job.kubernetes.rendezvous if target == "kubernetes" else "") or job.rendezvous
    return job.launch(*(("--rendezvous", endpoint) if endpoint else ()))
