"""Starts the agent from a checked spec. The zygote starts first, to import torch while the agent prepares."""

from __future__ import annotations

import gc
import os
import signal

from launcher import ending_file
from launcher.ranks.zygote_starter import ZygoteStarter
from launcher.settings.spec import LaunchSpec
from launcher.template import tree
from launcher.warm_pool import pooled_start
from rendezvous.values.error_codes import Code, with_code


def run_agent(spec: LaunchSpec) -> int:
    _fill_standard_streams()
    starter = ZygoteStarter(spec)
    for warning in starter.binding.warnings:
        _print_message(f"warning: {warning}")
    pooled = pooled_start.take_zygote(spec, starter)
    tree.become_subreaper()  # after the pool: what is left for the next command must not be ours
    # Blocked until the agent handles them: the default action of a signal would leave a log folder and processes.
    # And SIGTTOU from now on: with `stty tostop`, a line from the background would stop the launcher.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*spec.handled_signals, signal.SIGTTOU})
    try:
        zygote = starter.start() if pooled is None else pooled
    except OSError as error:
        from rendezvous.values.contracts import TRY_AGAIN

        problem = (
            f"error: cannot start the process that starts the ranks (zygote): {error.strerror}. Check ulimit -u "
            "and the free memory"
        )
        _print_message(with_code(problem, Code.CANNOT_START_RANKS))
        ending_file.leave(TRY_AGAIN, problem, Code.CANNOT_START_RANKS)
        return TRY_AGAIN
    starter.permit_open_files()
    # Imports make thousands of objects that stay: to look for garbage among them takes a tenth of their time.
    gc.disable()
    from launcher import error_boundary
    from launcher.agent import Agent
    from launcher.wiring import build_shell

    gc.freeze()
    gc.enable()

    return error_boundary.run(Agent(build_shell(spec, starter, zygote)).run())


def _print_message(text: str) -> None:
    os.write(2, f"ddp-launch: {text}\n".encode(errors="replace"))


def _fill_standard_streams() -> None:
    """Open closed standard streams on /dev/null. Otherwise a new pipe or socket would get descriptor 0, 1 or 2."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.dup(fd)
    os.close(fd)
