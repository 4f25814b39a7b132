"""The keywords of `ddp.launch` as options of the command, and what goes wrong with a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ddp.telemetry.coded import CodedError

# --- errors ----------------------------------------------------------------------------------------
#
# What goes wrong with a job of `ddp.launch`.

INVALID_ARGUMENT, CANNOT_PICKLE, RESULT_UNREADABLE = "DDP-6001", "DDP-6002", "DDP-6003"
PACKAGE_MISSING, JOB_FAILED = "DDP-1019", "DDP-5011"


class LaunchError(CodedError, RuntimeError):
    """A job of `ddp.launch` could not start, or failed. `failure` has the facts of failure.json."""

    def __init__(
        self, text: str, code: str, exit_code: int = 2, failure: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(text)
        self.code = code
        self.exit_code = exit_code
        self.failure = dict(failure or {})
        cause = self.failure.get("first_cause") or {}
        self.rank: int | None = cause.get("rank")
        self.node: str = cause.get("node", "")
        self.traceback: str = cause.get("traceback", "")
        self.log_dir: str = self.failure.get("log_dir", "")

    def __reduce__(self) -> tuple[type[LaunchError], tuple[object, ...]]:
        return LaunchError, (self.args[0], self.code, self.exit_code, self.failure)


def of_ending(ending: Mapping[str, Any], exit_code: int) -> LaunchError:
    """The error of a job that has ended so; `ending` is empty if its agent could not write it."""
    failure = ending.get("failure") or {}
    text = str(failure.get("summary") or ending.get("reason") or f"the job ended with exit code {exit_code}")
    found = LaunchError(text, str(ending.get("code") or JOB_FAILED), exit_code, failure)
    rows = [text]
    if found.traceback:
        rows += ["", f"the traceback of rank {found.rank}:", found.traceback.rstrip(), ""]
    if found.log_dir:
        rows += [f"the logs are in {found.log_dir}"]
    found.args = ("\n".join(rows),)
    return found


# --- the command line ------------------------------------------------------------------------------
#
# The keywords of `ddp.launch` as options of the command. Pure.

# Options that say what to run, or that start the command on machines without the folder of the function.
_NOT_FOR_FUNCTIONS = {
    "module": "the function is what runs",
    "no_python": "the function is what runs",
    "run_path": "the function is what runs",
    "hosts": "other machines do not have the function. Call ddp.launch on each node with nnodes and rendezvous",
    "hostfile": "other machines do not have the function. Call ddp.launch on each node with nnodes and rendezvous",
    "help": "use help(ddp.launch)",
    "version": "use ddp-launch --version",
    "print_config": "use ddp-launch --print-config",
}


def options_of(keywords: Mapping[str, Any]) -> list[str]:
    """Flags of ddp-launch. The command itself checks their names and values."""
    flags: list[str] = []
    for name, value in keywords.items():
        if name in _NOT_FOR_FUNCTIONS:
            raise LaunchError(
                f"ddp.launch does not accept {name}: {_NOT_FOR_FUNCTIONS[name]}", INVALID_ARGUMENT
            )
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                pass
            case bool():
                flags.append(flag if value else f"--no-{flag[2:]}")
            case list() | tuple():
                flags.append(f"{flag}={','.join(map(str, value))}")
            case dict():
                flags.append(f"{flag}={','.join(f'{key}={each}' for key, each in value.items())}")
            case _:
                flags.append(f"{flag}={value}")
    return flags


def name_of(function: object) -> str:
    """The name of the function as a part of the name of its job."""
    name = getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "", name) or "function"
