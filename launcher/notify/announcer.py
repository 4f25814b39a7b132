"""Turns what the agent experiences into events for the user's programs, and into traces."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from launcher.exchange import StartRanks
from launcher.notify import job_events
from launcher.notify.job_events import EventKind, JobEvent
from launcher.notify.subscribers import Subscribers, now_in_utc
from launcher.supervised import Phase
from rendezvous.values.events import Ended, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import Action, AgentEvent, Finish
    from launcher.notify.otlp import Exporter
    from launcher.notify.traces import Span, Value
    from launcher.settings.spec import LaunchSpec
    from launcher.supervised import Supervision
    from rendezvous.values.types import Outcome

_GENERATIONS_KEPT = 1000


def _exporter(spec: LaunchSpec, say: Callable[[str], None]) -> Exporter | None:
    """An HTTP client takes longer to import than the rest of the agent, so it is imported only if it is used."""
    if not spec.otlp_endpoint and not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        return None
    from launcher.notify import otlp

    to, problem = otlp.endpoint(spec.otlp_endpoint, os.environ)
    if problem:
        say(f"ddp-launch: traces are not exported: {problem}")
    return otlp.Exporter(to, say) if to is not None else None


class Announcer:
    def __init__(self, spec: LaunchSpec, say: Callable[[str], None], boundary: ErrorBoundary) -> None:
        self._job, self._boundary = spec.run_id, boundary
        self._subscribers = Subscribers(spec.on_event, say)
        self._exporter = _exporter(spec, say)
        self._state: Supervision | None = None
        self._began_s = time.time()
        self._generations: list[tuple[int, float, float]] = []  # number, begin, end
        self._reason = ""  # of the last stop

    def update(
        self, event: AgentEvent, before: Supervision, state: Supervision, actions: Sequence[Action]
    ) -> None:
        """`before` is the state before the event, `state` the one after it."""
        self._state = state
        started = any(isinstance(action, StartRanks) for action in actions)
        told = self._boundary.called(
            "reporting an event", lambda: job_events.of_step(event, state, started), None
        )
        self._announce(told)
        self._note_generation(before, state, started)
        if isinstance(event, Stop):
            self._reason = event.decision.reason
        if isinstance(event, Ended) and state.assignment is not None and state.assignment.node_rank == 0:
            self._export(lambda: self._whole_job(event.outcome, state))

    def _note_generation(self, before: Supervision, state: Supervision, started: bool) -> None:
        now = time.time()
        if started and state.assignment is not None and len(self._generations) < _GENERATIONS_KEPT:
            self._generations.append((state.assignment.generation, now, now))
        elif before.phase is Phase.RUNNING and self._generations:
            self._generations[-1] = (*self._generations[-1][:2], now)

    def _whole_job(self, outcome: Outcome, state: Supervision) -> Sequence[Span]:
        from launcher.notify.traces import Job, Ran, of_job

        attributes: dict[str, Value] = {
            "ddp.exit_code": outcome.exit_code,
            "ddp.restarts": outcome.restarts,
            "ddp.ranks": state.assignment.world_size if state.assignment is not None else 0,
        }
        if outcome.time is not None:
            attributes["ddp.goodput"] = outcome.time.spent.goodput
        error = "" if outcome.succeeded else outcome.reason
        agent = f"{state.agent.node} {state.agent.incarnation}"
        ran = tuple(Ran(*each) for each in self._generations)
        return of_job(Job(self._job, agent, self._began_s, time.time(), ran, attributes, error))

    def restarted(self, moments: Sequence[float | None], parts_s: Mapping[str, float]) -> None:
        """All ranks of this node have finished their first step after a restart.

        `moments`: the ends of its parts on the monotonic clock, with the beginning of the first one.
        """
        state = self._state
        if state is None or state.assignment is None:
            return
        if state.assignment.node_rank == 0:
            parts = {name.replace(" ", "_"): round(seconds, 4) for name, seconds in parts_s.items()}
            text = f"the ranks train again; the restart took {sum(parts_s.values()):.1f} s"
            self._announce(JobEvent(EventKind.RESTARTED, text, {"seconds": parts}))
        if self._exporter is not None:
            self._export(lambda: self._whole_restart(state, moments))

    def _whole_restart(self, state: Supervision, moments: Sequence[float | None]) -> Sequence[Span]:
        from launcher.notify.traces import Restart, of_restart

        if state.assignment is None or state.store is None:
            return ()
        offset, mine = time.time() - time.monotonic(), state.assignment
        at = tuple(None if moment is None else moment + offset for moment in moments)
        node, store = (state.agent.node, mine.node_rank), f"{state.store.host}:{state.store.port}"
        return of_restart(Restart(self._job, *node, mine.generation, store, self._reason, at))

    def node_news(self, text: str) -> None:
        self._announce(JobEvent(EventKind.NODE, text, {}))

    def finish(self, finish: Finish) -> None:
        self._announce(job_events.of_finish(finish))

    def close(self) -> None:
        """Wait for a limited time until all events and traces are passed on."""
        self._subscribers.close()
        if self._exporter is not None:
            self._exporter.close()

    def _announce(self, event: JobEvent | None) -> None:
        if event is not None:
            self._subscribers.put(job_events.as_object(event, self._state, self._job, now_in_utc()))

    def _export(self, spans: Callable[[], Sequence[Span]]) -> None:
        if self._exporter is not None:
            self._exporter.put(self._boundary.called("making a trace", spans, ()))
