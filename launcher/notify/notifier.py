"""Turns what the agent experiences into events for the user's programs, and into traces."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import _ddp_launch_entry as doors
from launcher.exchange import StartRanks
from launcher.notify import job_events
from launcher.notify.job_events import EventKind, JobEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent, AgentStep, Finish, Supervision
    from launcher.settings.spec import LaunchSpec


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
        told = self._boundary.called(
            "reporting an event", lambda: job_events.of_step(event, state, started), None
        )
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
        self._announce(job_events.of_finish(finish))

    def close(self) -> None:
        """Wait for a limited time until all events and traces are passed on."""
        self._subscribers.close()
        if self._sink is not None:
            self._sink.close()

    def _announce(self, event: JobEvent | None) -> None:
        if event is not None:
            found = job_events.as_object(event, self._state, self._job, now_in_utc())
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
