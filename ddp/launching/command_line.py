"""The keywords of `ddp.launch` as options of the command. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ddp.launching.errors import INVALID_ARGUMENT, LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
