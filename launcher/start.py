"""From a checked spec to a running agent. The zygote starts first, to import torch while the agent prepares."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from launcher.ranks.zygote_starter import ZygoteStarter
from launcher.template import tree

if TYPE_CHECKING:
    from launcher.settings.spec import LaunchSpec


def run_agent(spec: LaunchSpec) -> int:
    _fill_standard_streams()
    tree.become_subreaper()
    starter = ZygoteStarter(spec)
    for warning in starter.binding.warnings:
        _complain(f"warning: {warning}")
    # Until the agent handles them: a signal's default action would leave a log folder and a partial start behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, spec.handled_signals)
    try:
        zygote = starter.start()
    except OSError as error:
        from launcher.supervision import TRY_AGAIN

        _complain(f"error: cannot start a process: {error.strerror}")
        return TRY_AGAIN
    from launcher import daemon_threads
    from launcher.agent import Agent
    from launcher.wiring import build_shell

    return daemon_threads.run(Agent(build_shell(spec, starter, zygote)).run())


def _complain(text: str) -> None:
    os.write(2, f"ddp-launch: {text}\n".encode(errors="replace"))


def _fill_standard_streams() -> None:
    """Open the standard streams that are closed: another pipe or socket would get the number, and be written to."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.dup(fd)
    os.close(fd)
