"""`ddp-launch plan [options] train.py [args ...]`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ddp_launch_wings.plan import step_model as profiles
from ddp_launch_wings.plan import table
from ddp_launch_wings.plan.prediction import FailureModel, Question, predict
from ddp_launch_wings.plan.step_model import (
    TRANSPORTS,
    BadProfile,
    Link,
    Profile,
    from_text,
    measured_link,
    merged,
    usual,
    usual_inside,
)
from launcher.settings.arguments import UsageError
from launcher.settings.values import printable
from launcher.template.contracts import STEP_PROFILE, STEP_PROFILE_STEPS
from rendezvous.values.error_codes import Code

_FEWEST_STEPS = 3
_EPILOG = (
    "Without --profile, some steps of the script run on this machine first, with the ranks of one node. The page "
    "`ddp-launch docs plan` explains the model and its limits."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"ddp-launch plan: {message}. Use ddp-launch plan --help.", code=Code.INVALID_COMMAND_LINE
        )


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="ddp-launch plan",
        description="Predict step time, efficiency and goodput of a job on more nodes.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = made.add_argument
    add(
        "--nodes",
        metavar="N[,N...]",
        default="32",
        help="numbers of nodes; one number includes smaller ones (32)",
    )
    add("--ranks-per-node", metavar="N", help="default: the number of profiled ranks")
    add("--link", metavar="RATE", default="100gbit", help="bandwidth between nodes (100gbit)")
    add("--latency", metavar="TIME", default="20us", help="latency of a message between nodes (20us)")
    add("--inside", metavar="RATE", help="bandwidth between ranks of a node; default: measured, if ranks > 1")
    add("--transport", choices=list(TRANSPORTS), help="default: nccl for GPUs, hier for CPUs")
    add("--node-mtbf", metavar="TIME", default="6000h", help="mean time between failures of one node (6000h)")
    add("--restart", metavar="TIME", default="30s", help="from a failure to the next training step (30s)")
    add("--checkpoint-stall", metavar="TIME", default="1s", help="how long a checkpoint stops training (1s)")
    add("--checkpoint-every", metavar="TIME", help="default: the best interval")
    add(
        "--diloco-every",
        metavar="STEPS",
        type=int,
        default=100,
        help="steps between averages of DiLoCo (100)",
    )
    add("--profile", metavar="FILE", help="use this profile, and run nothing")
    add("--save-profile", metavar="FILE", help="write the profile there, for --profile")
    add("--profile-ranks", metavar="N", help="ranks of the profiled run; default: --ranks-per-node, or 1")
    add("--profile-timeout", metavar="TIME", default="10m", help="limit for the profiled run (10m)")
    add("--steps", metavar="N", type=int, default=20, help="steps to profile, after 5 that do not count (20)")
    add("--json", action="store_true", help="print values for programs")
    add("-m", "--module", action="store_true", help="the script is a module")
    add("words", metavar="script.py [args ...]", nargs=argparse.REMAINDER)
    return made


def run(words: list[str], environ: Mapping[str, str], tell: Callable[[str], None]) -> str:
    """Return the text to print. `tell` shows what is done meanwhile."""
    given = parser().parse_args(words)
    _check(given)
    nodes = table.node_counts("--nodes", given.nodes)
    failures = _failures(given)
    link = Link(table.rate("--link", given.link), table.seconds("--latency", given.latency))
    asked_inside = table.rate("--inside", given.inside) if given.inside else None
    profile = _profile(given, environ, tell)
    ranks = (
        table.ranks_per_node("--ranks-per-node", given.ranks_per_node)
        if given.ranks_per_node
        else profile.ranks
    )
    question = Question(
        profile,
        ranks,
        link,
        _inside(profile, asked_inside),
        TRANSPORTS[given.transport] if given.transport else usual(profile.device),
        failures,
        given.diloco_every,
    )
    predictions = predict(question, nodes)
    if given.json:
        return json.dumps(table.as_values(question, predictions), indent=1)
    return table.text(question, predictions)


def _check(given: argparse.Namespace) -> None:
    if given.profile and given.words:
        raise UsageError(
            f"--profile uses a recorded profile, so {printable(given.words[0])} would not run. Give one of both.",
            code=Code.CONTRADICTING_OPTIONS,
        )
    if not given.profile and not given.words:
        raise UsageError(
            "ddp-launch plan needs a script to profile, or --profile FILE.", code=Code.MISSING_SCRIPT
        )
    for option, value, fewest in (
        ("--steps", given.steps, _FEWEST_STEPS),
        ("--diloco-every", given.diloco_every, 1),
    ):
        if value < fewest:
            raise UsageError(
                f"{option} {value} is too small. Give at least {fewest}.", code=Code.INVALID_VALUE
            )


def _failures(given: argparse.Namespace) -> FailureModel:
    every = given.checkpoint_every
    return FailureModel(
        table.seconds("--node-mtbf", given.node_mtbf),
        table.seconds("--restart", given.restart),
        table.seconds("--checkpoint-stall", given.checkpoint_stall),
        table.seconds("--checkpoint-every", every) if every else None,
    )


def _profile(given: argparse.Namespace, environ: Mapping[str, str], tell: Callable[[str], None]) -> Profile:
    if given.profile:
        return read_profile(given.profile)
    asked = given.profile_ranks or given.ranks_per_node or "1"
    ranks = table.ranks_per_node("--profile-ranks" if given.profile_ranks else "--ranks-per-node", asked)
    timeout = table.seconds("--profile-timeout", given.profile_timeout)
    words = (*(("-m",) if given.module else ()), *given.words)
    tell(f"profiling {given.steps} steps of {printable(given.words[0])} with {ranks} rank{'s' * (ranks > 1)}")
    profile = record_profile(words, ranks, given.steps, timeout, environ)
    if given.save_profile:
        _save(given.save_profile, profiles.to_text(profile))
    return profile


def _save(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write the profile to {printable(path)}: {error.strerror}.", code=Code.CANNOT_WRITE_OUTPUT
        ) from None


def _inside(profile: Profile, asked: float | None) -> Link:
    link = measured_link(profile.inside, profile.ranks) if profile.inside else usual_inside(profile.device)
    return Link(asked, link.latency_s) if asked else link


# --- profiling --------------------------------------------------------------------------------------
#
# Runs some steps of the script on this machine, and reads the profiles that its ranks leave.

_SHOWN_LINES = 15
_STOP_S = 30.0


class CannotProfile(UsageError):
    exit_code = 1
    code = Code.CANNOT_PROFILE


def read_profile(path: str) -> Profile:
    try:
        with open(path, encoding="utf-8") as file:
            return from_text(file.read())
    except OSError as error:
        raise UsageError(
            f"cannot read the profile {printable(path)}: {error.strerror}.", code=Code.FILE_UNREADABLE
        ) from None
    except (BadProfile, UnicodeDecodeError) as error:
        raise CannotProfile(
            f"cannot use the profile {printable(path)}: {error}. Make a new one with --save-profile."
        ) from None


def record_profile(
    words: tuple[str, ...], ranks: int, steps: int, timeout_s: float, environ: Mapping[str, str]
) -> Profile:
    """Run the script until its ranks have recorded enough steps."""
    with tempfile.TemporaryDirectory(prefix="ddp-plan-") as folder:
        path, log = os.path.join(folder, "profile"), os.path.join(folder, "log")
        command = [
            sys.executable,
            "-m",
            "launcher",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            "0",
            *words,
        ]
        env = {**environ, STEP_PROFILE: path, STEP_PROFILE_STEPS: str(steps)}
        with open(log, "wb") as output:
            code = _run(command, env, output, timeout_s)
        records = [_read(f"{path}.{rank}") for rank in range(ranks)]
        found = [record for record in records if record is not None]
        for record in found:
            if "problem" in record:
                raise CannotProfile(f"this script cannot be profiled: {record['problem']}.")
        if len(found) < ranks or not all(record["gradients"] for record in found):
            raise _no_profile(words, code, timeout_s, log)
        return merged(found)


def _run(command: list[str], env: dict[str, str], output: Any, timeout_s: float) -> int | None:
    """The exit code of the job; None if it took too long and was stopped."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            record: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return record


def _no_profile(words: tuple[str, ...], code: int | None, timeout_s: float, log: str) -> CannotProfile:
    if code is None:
        reason = f"did not make enough steps within {timeout_s:g} s. Use --profile-timeout or fewer --steps"
    elif code:
        reason = f"failed (exit code {code}) before it had made enough steps. Run it with ddp-launch first"
    else:
        reason = "made fewer than 8 training steps with an optimizer of torch. Use a longer run"
    with open(log, encoding="utf-8", errors="replace") as file:
        tail = "".join(file.readlines()[-_SHOWN_LINES:]).rstrip()
    said = f" The end of its output:\n{tail}" if tail else ""
    return CannotProfile(f"{printable(words[-1] if words[0] == '-m' else words[0])} {reason}.{said}")
