"""Turns what the agent experiences into events for the user's programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.exchange import StartRanks
from launcher.notify import job_events
from launcher.notify.job_events import EventKind, JobEvent
from launcher.notify.subscribers import Subscribers, now_in_utc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import Action, AgentEvent, Finish
    from launcher.settings.spec import LaunchSpec
    from launcher.supervised import Supervision


class Announcer:
    def __init__(self, spec: LaunchSpec, say: Callable[[str], None], boundary: ErrorBoundary) -> None:
        self._job, self._boundary = spec.run_id, boundary
        self._subscribers = Subscribers(spec.on_event, say)
        self._state: Supervision | None = None

    def update(self, event: AgentEvent, state: Supervision, actions: Sequence[Action]) -> None:
        """`state` is the state after the event."""
        self._state = state
        started = any(isinstance(action, StartRanks) for action in actions)
        self._announce(
            self._boundary.called(
                "reporting an event", lambda: job_events.of_step(event, state, started), None
            )
        )

    def node_news(self, text: str) -> None:
        self._announce(JobEvent(EventKind.NODE, text, {}))

    def finish(self, finish: Finish) -> None:
        self._announce(job_events.of_finish(finish))

    def close(self) -> None:
        """Wait for a limited time until all events are passed on."""
        self._subscribers.close()

    def _announce(self, event: JobEvent | None) -> None:
        if event is not None:
            self._subscribers.put(job_events.as_object(event, self._state, self._job, now_in_utc()))
