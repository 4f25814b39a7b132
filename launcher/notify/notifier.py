"""Turns what the agent experiences into events for the user's programs, and into traces."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import _ddp_launch_entry as doors
from launcher.exchange import AgentEvent, AgentStep, Finish, StartRanks, Supervision
from rendezvous.values.cause_text import cause_json, counted
from rendezvous.values.events import Ended, Notice, Stop
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import CLASSES
from rendezvous.values.types import Cause, DecisionKind, FailureClass, Outcome

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.settings.spec import LaunchSpec


# What happens to the job, as objects for `--on-event` and entry points (docs/events.md). Pure.
#
# The agent of node rank 0 reports what concerns the whole job, so that it is reported once. If that node is lost, the
# agent of node rank 1 does. Each agent reports what concerns its own node.

VERSION = 1


class EventKind(StrEnum):
    STARTED = "started"  # the ranks of the first generation start
    STOPPING = "stopping"  # the ranks are stopped, after a failure or for another reason
    RESTARTED = "restarted"  # the ranks of node rank 0 have finished their first step after a restart
    NOTICE = "notice"  # for example a rank that is slower than its peers
    NODE = "node"  # the health of this node has changed
    ENDED = "ended"  # the job is over
    LEFT = "left"  # this agent was stopped, or rejected: the job may continue without it


@dataclass(frozen=True, slots=True)
class JobEvent:
    kind: EventKind
    text: str
    details: Mapping[str, Any]


def of_step(event: AgentEvent, state: Supervision, started: bool) -> JobEvent | None:
    """The event for a step of the state machine, if this agent is the one that reports it.

    `started`: the ranks of this node have been started in this step.
    """
    mine = state.assignment
    if started and mine is not None and mine.node_rank == 0 and mine.generation == 1:
        start = "starts" if mine.world_size == 1 else "start"
        text = f"{counted(mine.world_size, 'rank')} {start} on {counted(mine.n_nodes, 'node')}"
        return JobEvent(EventKind.STARTED, text, {})
    match event:
        case Stop(_, decision) if _reports(state, decision.cause) and decision.kind is not DecisionKind.FAIL:
            details = {"decision": decision.title, "cause": decision.cause and cause_json(decision.cause)}
            # What follows a failure is decided again when all ranks have stopped.
            failed = None if decision.cause is None else _of_cause(decision.cause)
            return JobEvent(EventKind.STOPPING, failed or decision.reason, details)
        case Notice(_, text) if _reports(state, None):
            return JobEvent(EventKind.NOTICE, text, {})
        case Ended(outcome) if _reports(state, outcome.first_cause):
            return JobEvent(EventKind.ENDED, _text_of(outcome), _ending(outcome))
        case _:
            return None


def of_finish(finish: Finish) -> JobEvent | None:
    """The event for an agent that ends without an outcome of the job."""
    if finish.outcome is not None:
        return None
    return JobEvent(EventKind.LEFT, finish.reason, {"exit_code": finish.exit_code})


def _reports(state: Supervision, cause: Cause | None) -> bool:
    mine = state.assignment
    if mine is None:
        return False
    first_is_lost = (
        cause is not None and cause.failure is FailureClass.NODE_LOST and cause.node == mine.store_node
    )
    return mine.node_rank == (1 if first_is_lost else 0)


def as_object(event: JobEvent, state: Supervision | None, job: str, at: str) -> dict[str, Any]:
    """`at`: the time as text, in UTC."""
    mine = state.assignment if state is not None else None
    return {
        "version": VERSION,
        "event": str(event.kind),
        "time": at,
        "job": job,
        "node": state.agent.node if state is not None else "",
        "generation": mine.generation if mine is not None else 0,
        "ranks": mine.world_size if mine is not None else 0,
        "restarts": mine.restart_count if mine is not None else 0,
        "text": event.text,
        **event.details,
    }


def _text_of(outcome: Outcome) -> str:
    if outcome.succeeded or outcome.first_cause is None:
        return outcome.reason
    return f"{_of_cause(outcome.first_cause)}; {outcome.reason}"


def _of_cause(cause: Cause) -> str:
    return f"rank {cause.rank} on {cause.node}: {cause.reason}"


def _ending(outcome: Outcome) -> dict[str, Any]:
    spent = outcome.time.spent if outcome.time is not None else None
    return {
        "succeeded": outcome.succeeded,
        "exit_code": outcome.exit_code,
        "cause": outcome.first_cause and cause_json(outcome.first_cause),
        "goodput": None if spent is None else round(spent.goodput, 6),
        "seconds": None if spent is None else {name: round(getattr(spent, name), 3) for name in CLASSES},
    }


class EventSink(Protocol):
    """The door `ddp_launch.event_sink`. It is told each step of the agent, on its event loop: it must not wait."""

    def step(
        self, event: AgentEvent, before: Supervision, state: Supervision, /, *, started: bool
    ) -> None: ...

    def restarted(self, state: Supervision, moments: Sequence[float | None], /) -> None: ...

    def close(self) -> None:
        """Wait for a limited time until all is passed on."""


def _sink(spec: LaunchSpec, say: Callable[[str], None]) -> EventSink | None:
    """A sink may take longer to import than the rest of the agent, so it is imported only if it is used."""
    if not spec.otlp_endpoint and not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        return None
    try:
        found: EventSink | None = doors.find(doors.EVENT_SINK, "otlp")(
            spec.otlp_endpoint, os.environ, spec.job.job_id, say
        )
    except doors.WingMissing as error:  # the variables may be meant for the script
        say(f"ddp-launch: traces are not exported: {error}")
        return None
    return found


class EventNotifier:
    def __init__(self, spec: LaunchSpec, say: Callable[[str], None], boundary: ErrorBoundary) -> None:
        self._job, self._boundary = spec.job.job_id, boundary
        self._subscribers = Subscribers(spec.on_event, say)
        self._sink = _sink(spec, say)
        self._state: Supervision | None = None
        self.logged: Callable[[], Mapping[str, object]] = dict  # what the script measures, now

    def observe(self, step: AgentStep) -> None:
        event, before, state, actions = step
        self._state = state
        started = any(isinstance(action, StartRanks) for action in actions)
        told = self._boundary.called("reporting an event", lambda: of_step(event, state, started), None)
        self._announce(told)
        if (sink := self._sink) is not None:
            self._boundary.called(
                "making a trace", lambda: sink.step(event, before, state, started=started), None
            )

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
        if (sink := self._sink) is not None:
            self._boundary.called("making a trace", lambda: sink.restarted(state, moments), None)

    def node_news(self, text: str) -> None:
        self._announce(JobEvent(EventKind.NODE, text, {}))

    def finish(self, finish: Finish) -> None:
        self._announce(of_finish(finish))

    def close(self) -> None:
        """Wait for a limited time until all events and traces are passed on."""
        self._subscribers.close()
        if self._sink is not None:
            self._sink.close()

    def _announce(self, event: JobEvent | None) -> None:
        if event is not None:
            found = as_object(event, self._state, self._job, now_in_utc())
            logged = self.logged()
            self._subscribers.put({**found, "logged": logged} if logged else found)


# --- subscribers ------------------------------------------------------------------------------------
#
# Passes events to the command of `--on-event` and to entry points, in order, on a thread of its own.
#
# A command that is slow, fails or hangs delays only the events after it. At the end of the job the agent waits a short
# time for what is left.

GROUP = "ddp_launch.events"
VARIABLE = "DDP_LAUNCH_EVENT"
_COMMAND_S = 30.0
_AT_THE_END_S = 10.0
_WAITING = 256  # events
_SHOWN_CHARS = 300


class Subscribers:
    def __init__(self, command: str, say: Callable[[str], None]) -> None:
        """`say` writes one line and may be called from any thread."""
        self._command, self._say = command, say
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._entry_points: list[tuple[str, Callable[[dict[str, Any]], Any]]] | None = None
        self._told: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None  # of the command that runs now
        self._is_over = False

    def put(self, event: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="events", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._tell_once(f"{_WAITING} events wait for --on-event; the events after them are lost")

    def close(self) -> None:
        """Wait until all events are passed on, for a limited time."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._events.put_nowait(None)
        self._thread.join(_AT_THE_END_S)
        if self._thread.is_alive():
            limit = f"{_AT_THE_END_S:g} s after the job"
            self._tell_once(f"--on-event has not finished within {limit}: what still ran was killed")
            self._is_over = True
            if self._process is not None:
                _kill(self._process)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if self._command:
                self._run_command(event)
            for name, function in self._functions():
                try:
                    function(dict(event))
                except Exception as error:
                    self._tell_once(
                        f"the entry point {name} ({GROUP}) failed: {type(error).__name__}: {error}"
                    )

    def _functions(self) -> list[tuple[str, Callable[[dict[str, Any]], Any]]]:
        if self._entry_points is None:
            self._entry_points = []
            if not doors.others_may_name(GROUP):
                return []
            from importlib import metadata

            for point in metadata.entry_points(group=GROUP):
                try:
                    self._entry_points.append((point.name, point.load()))
                except Exception as error:
                    words = f"{type(error).__name__}: {error}"
                    self._tell_once(f"the entry point {point.name} ({GROUP}) cannot be loaded: {words}")
        return self._entry_points

    def _run_command(self, event: dict[str, Any]) -> None:
        try:
            process = self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | {VARIABLE: event["event"]},
                # Ctrl-C is for the job, and ends no message about it. In the agent's session, or the clean-up after
                # a zygote would take it for a process that a rank has left behind.
                process_group=0,
            )
        except OSError as error:
            return self._tell_once(f"--on-event: cannot start the command: {error.strerror}")
        try:
            _out, err = process.communicate(json.dumps(event).encode() + b"\n", _COMMAND_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return self._tell_once(
                f"--on-event: the command took longer than {_COMMAND_S:g} s and was killed"
            )
        if process.returncode:
            last = " ".join(err.decode(errors="replace").split())[-_SHOWN_CHARS:]
            self._tell_once(f"--on-event: the command ended with exit code {process.returncode}: {last}")
        return None

    def _tell_once(self, text: str) -> None:
        if text not in self._told and not self._is_over:
            self._told.add(text)
            self._say(f"ddp-launch: {text}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def now_in_utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
