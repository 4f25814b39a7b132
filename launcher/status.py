"""The live line at the bottom of a terminal: generation, ranks, restarts, time."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from launcher.supervised import Phase
from rendezvous.events import Assigned, Waiting

if TYPE_CHECKING:
    from launcher.exchange import Fact
    from launcher.output.logs import LogPump
    from launcher.settings.spec import LaunchSpec
    from launcher.supervised import Supervision


class StatusLine:
    def __init__(self, spec: LaunchSpec, logs: LogPump) -> None:
        self._logs = logs
        self._target = spec.entry.target.rpartition("/")[2]
        self._shown = spec.progress == "always" or (spec.progress == "auto" and os.isatty(2))
        self._started = time.monotonic()
        self._text = "joining"

    async def run(self) -> None:
        """Once a second, and not at all where nobody would see it."""
        while self._shown:
            self._show()
            await asyncio.sleep(1.0)

    def update(self, state: Supervision, fact: Fact) -> None:
        match fact:
            case Waiting(reason, present, wanted):
                self._text = f"{reason} ({present} of {wanted} nodes)"
            case _ if state.assignment is not None:
                self._text = _running_text(state, isinstance(fact, Assigned))
        if self._shown:
            self._show()

    def _show(self) -> None:
        seconds = int(time.monotonic() - self._started)
        clock = f"{seconds // 3600:d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        self._logs.progress(f"ddp-launch {self._target} | {self._text} | {clock}")


def _running_text(state: Supervision, starting: bool) -> str:
    assignment = state.assignment
    assert assignment is not None
    restarts = f"restarts {assignment.restart_count} of {assignment.max_restarts}"
    if starting or state.phase is Phase.JOINING:
        doing = "starting"
    elif state.phase is Phase.STOPPING:
        doing = f"stopping, {len(state.live)} still there"
    else:
        doing = f"{len(state.live)} of {assignment.nproc} ranks running"
    return f"{doing} | generation {assignment.generation} | {restarts}"
