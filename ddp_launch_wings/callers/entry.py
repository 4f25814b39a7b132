"""`torchrun`, and `run` of `torch.distributed.run`, with our agent.

`accelerate launch` and others call `run` in their own process, with torch's parsed options. The agent runs as a child,
because it needs a process with a single thread. `run` returns when the job has succeeded, and raises `ChildFailedError`
when it has failed, as torch's does. Signals to the caller go to the agent.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher import cli
from launcher.settings.arguments import read_arguments

_AGENT = "import sys; from _ddp_launch_entry import ddp_launch; sys.exit(ddp_launch())"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def command(words: list[str], environ: Mapping[str, str], _tell: Callable[[str], None]) -> str:
    """`ddp-launch --as-torchrun ...`: what torchrun does unless told otherwise."""
    line = read_arguments(words)
    raise SystemExit(cli.main([*defaults(line.options, environ), *words]))


def defaults(given: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's defaults that differ from ours: one rank, and no secret between nodes."""
    names = {"nproc_per_node": "1", "insecure": ""}
    if "secret_file" in given or environ.get("DDP_LAUNCH_SECRET_FILE"):
        del names["insecure"]
    return [
        f"--{name.replace('_', '-')}" + (f"={value}" if value else "")
        for name, value in names.items()
        if not (
            name in given or environ.get(f"PET_{name.upper()}") or environ.get(f"DDP_LAUNCH_{name.upper()}")
        )
    ]


def words_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the command line that torch's parser has made these values of."""
    words: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings or value is None or value == action.default:
            continue
        if action.nargs == 0:
            words += [action.option_strings[0]] if value else []
        else:
            text = ",".join(value) if isinstance(value, list) else str(value)
            words.append(f"{_long(action.option_strings)}={text}")
    return [*words, "--", args.training_script, *args.training_script_args]


def _long(spellings: Sequence[str]) -> str:
    return next((each for each in spellings if each.startswith("--")), spellings[0])


def run(args: argparse.Namespace) -> None:
    """Stand in for `torch.distributed.run.run`."""
    from torch.distributed import run as torchs

    words = words_of(args, torchs.get_args_parser())
    code = _run_agent([sys.executable, "-c", _AGENT, "--as-torchrun", *words])
    if code:
        raise _failed(str(args.training_script), code)


def _run_agent(command_line: list[str]) -> int:
    """Run it in the same process group, so that it may use the terminal, and pass signals on."""
    before: dict[signal.Signals, Any] = {}
    agent: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, _frame: object) -> None:
        # The terminal sends Ctrl-C to the agent as well, and a second signal would end it at once.
        if agent and not (signum in (signal.SIGINT, signal.SIGQUIT) and _is_at_terminal()):
            agent[0].send_signal(signum)

    try:
        for signum in HANDLED:
            before[signum] = signal.signal(signum, pass_on)
    except ValueError:  # not the main thread, which keeps its handlers
        pass
    try:
        agent.append(subprocess.Popen(command_line))
        return agent[0].wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_at_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _failed(script: str, code: int) -> Exception:
    """Our agent has already said on stderr which rank failed and why."""
    from torch.distributed.elastic.multiprocessing import errors

    failure = errors.ProcessFailure(local_rank=0, pid=0, exitcode=code if code > 0 else 1, error_file="<N/A>")
    return errors.ChildFailedError(script, {0: failure})
