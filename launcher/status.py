"""Shows the status of the job: a live line at the bottom of a terminal, and log lines while it waits for nodes."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from launcher.exchange import Phase
from launcher.health import step_rate
from launcher.output.lines import can_redraw
from rendezvous.values.counted import counted
from rendezvous.values.events import Assigned, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.exchange import AgentEvent, Supervision
    from launcher.output.logs import LogPump
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.rank_view import RankView

_FIRST_S, _SECOND_S, _LONGEST_PAUSE_S = 2.0, 10.0, 600.0


class StatusLine:
    def __init__(self, spec: LaunchSpec, logs: LogPump) -> None:
        self._logs = logs
        self._target = spec.entry.name
        is_drawn = can_redraw(os.isatty(2), os.environ)
        self._shown = spec.progress == "always" or (spec.progress == "auto" and is_drawn)
        self.is_seen = self._shown and is_drawn
        self._started = time.monotonic()
        self._text = "joining"
        self._read: Callable[[], Sequence[RankView]] = tuple
        self._views: Callable[[], Sequence[RankView]] | None = None  # while ranks run

    def watch(self, views: Callable[[], Sequence[RankView]]) -> None:
        """Show the steps of these ranks too."""
        self._read = views

    async def run(self) -> None:
        """Refresh once a second, if the line is shown."""
        while self._shown:
            self._show()
            await asyncio.sleep(1.0)

    def update(self, state: Supervision, event: AgentEvent) -> None:
        match event:
            case Waiting(reason, present, wanted):
                self._text = f"{reason} ({present} of {wanted} nodes)"
            case _ if state.assignment is not None:
                self._text = _running_text(state, isinstance(event, Assigned))
        self._views = self._read if state.phase is Phase.RUNNING else None
        if self._shown:
            self._show()

    def _show(self) -> None:
        seconds = int(time.monotonic() - self._started)
        clock = f"{seconds // 3600:d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        steps = step_rate.in_words(self._views()) if self._views is not None else ""
        parts = filter(None, (f"ddp-launch {self._target}", steps, self._text, clock))
        self._logs.progress(" | ".join(parts))


class WaitingMessages:
    """Logs what the job waits for, at the moments of `next_message_s`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._what = ""
        self._next: asyncio.TimerHandle | None = None

    def update(self, event: AgentEvent) -> None:
        match event:
            case Waiting(reason, present, wanted, stands_by=False):
                self._what = f"{reason} ({present} of {wanted} nodes have joined)"
                if self._next is None:
                    self._log_after(0.0)
            case Waiting() | Assigned():  # UserMessages reports a standby at once
                self.end()

    def end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _log_after(self, waited_s: float) -> None:
        then_s = next_message_s(waited_s)
        self._next = asyncio.get_running_loop().call_later(then_s - waited_s, self._log, then_s)

    def _log(self, waited_s: float) -> None:
        self._say(f"{self._what}, for {waited_s:.0f} s so far")
        self._log_after(waited_s)


def next_message_s(waited_s: float) -> float:
    """How long a wait is when it is mentioned again: 2 s, 10 s, then each time it has doubled, or every 10 min.

    A person at a terminal must see soon what is missing; in a log, nodes that come seconds apart are no news.
    """
    if waited_s < _FIRST_S:
        return _FIRST_S
    return max(_SECOND_S, waited_s + min(waited_s, _LONGEST_PAUSE_S))


def _running_text(state: Supervision, starting: bool) -> str:
    assignment = state.assignment
    assert assignment is not None
    heals = f" | healed {counted(assignment.heals, 'time')}" if assignment.heals else ""
    restarted = assignment.restart_count - assignment.heals
    restarts = f"restarts {restarted} of {assignment.max_restarts}{heals}"
    if state.phase is Phase.JOINING and state.parked:
        doing = f"healing, {counted(len(state.parked), 'rank')} paused"
    elif starting or state.phase is Phase.JOINING:
        doing = "starting"
    elif state.in_place:
        doing = f"healing, {len(state.parked)} of {len(state.live)} ranks paused"
    elif state.phase is Phase.STOPPING:
        doing = f"stopping, {counted(len(state.live), 'rank')} still running"
    else:
        doing = f"{len(state.live)} of {counted(assignment.nproc, 'rank')} running"
    return f"{doing} | generation {assignment.generation} | {restarts}"
