"""Sends spans to an OTLP endpoint over HTTP, as JSON, on a thread of its own (docs/decisions/0020).

The variables are those of OpenTelemetry. An endpoint that does not answer is tried a few times, and costs one line.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from ddp_launch_wings.otlp import traces
from ddp_launch_wings.otlp.traces import TraceSpan, Value
from launcher.exchange import AgentEvent, AgentPhase, Supervision
from rendezvous.values.contracts import VERSION
from rendezvous.values.events import Ended, Stop
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import Outcome

_PREFIX = "OTEL_EXPORTER_OTLP_"
_TIMEOUT_S = 5.0
_TRIES, _PAUSE_S = 3, 1.0
_AT_THE_END_S = 5.0
_WAITING = 64
_TRY_AGAIN = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    url: str
    headers: Mapping[str, str]
    resource: Mapping[str, Value]


def endpoint(asked: str, environ: Mapping[str, str]) -> tuple[OtlpEndpoint | None, str]:
    """Return the endpoint of the option, else of the environment, and what is wrong with it."""
    exact = environ.get(f"{_PREFIX}TRACES_ENDPOINT", "")
    base = asked or ("" if exact else environ.get(f"{_PREFIX}ENDPOINT", ""))
    if not asked:
        protocol = environ.get(f"{_PREFIX}TRACES_PROTOCOL") or environ.get(f"{_PREFIX}PROTOCOL", "")
        is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if is_off or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp" or not (base or exact):
            return None, ""
        if protocol == "grpc":
            problem = "the protocol is grpc, but ddp-launch exports over HTTP; set --otlp-endpoint, usually port 4318"
            return None, problem
    url = exact if exact and not asked else _with_path(base)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        return None, f"{url!r} is not an http:// or https:// URL"
    service = environ.get("OTEL_SERVICE_NAME", "ddp-launch")
    resource: dict[str, Value] = {
        "service.name": service,
        **_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
    }
    headers = _pairs(environ.get(f"{_PREFIX}TRACES_HEADERS") or environ.get(f"{_PREFIX}HEADERS", ""))
    return OtlpEndpoint(url, headers, resource), ""


def _with_path(base: str) -> str:
    return base if base.rstrip("/").endswith("/v1/traces") else f"{base.rstrip('/')}/v1/traces"


def _pairs(text: str) -> dict[str, str]:
    """ "name=value,name=value", percent-encoded, as in the variables of OpenTelemetry."""
    found = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): unquote(value.strip()) for name, _, value in found if name.strip()}


class Exporter:
    def __init__(self, to: OtlpEndpoint, say: Callable[[str], None]) -> None:
        """`say` writes one line and may be called from any thread."""
        self._to, self._say = to, say
        self._spans: queue.Queue[Sequence[TraceSpan] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def put(self, spans: Sequence[TraceSpan]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
            self._thread.start()
        with suppress(queue.Full):  # the endpoint does not answer; a line has said so
            self._spans.put_nowait(spans)

    def close(self) -> None:
        if self._thread is not None:
            with suppress(queue.Full):
                self._spans.put_nowait(None)
            self._thread.join(_AT_THE_END_S)

    def _run(self) -> None:
        while (spans := self._spans.get()) is not None:
            problem = self._send(json.dumps(traces.payload(spans, self._to.resource, VERSION)).encode())
            if problem and not self._has_failed:
                self._say(
                    f"ddp-launch: cannot export traces to {self._to.url}: {problem}; the job is not affected"
                )
            self._has_failed = bool(problem)

    def _send(self, body: bytes) -> str:
        """Return what is wrong, or ""."""
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            try:
                headers = {"Content-Type": "application/json", **self._to.headers}
                request = urllib.request.Request(self._to.url, body, headers)
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                    return ""
            except urllib.error.HTTPError as error:
                problem = f"it answered {error.code} {error.reason}"
                error.close()
                if error.code not in _TRY_AGAIN:
                    break
            except (OSError, ValueError) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
        return problem


# --- what the agent experiences, as traces --------------------------------------------------------------

_GENERATIONS_KEPT = 1000


def sink(asked: str, environ: Mapping[str, str], job: str, say: Callable[[str], None]) -> Tracer | None:
    to, problem = endpoint(asked, environ)
    if problem:
        say(f"ddp-launch: traces are not exported: {problem}")
    return None if to is None else Tracer(job, Exporter(to, say))


class Tracer:
    def __init__(self, job: str, exporter: Exporter) -> None:
        self._job, self._exporter = job, exporter
        self._began_s = time.time()
        self._generations: list[tuple[int, float, float]] = []  # number, begin, end
        self._reason = ""  # of the last stop

    def step(self, event: AgentEvent, before: Supervision, state: Supervision, *, started: bool) -> None:
        now = time.time()
        if started and state.assignment is not None and len(self._generations) < _GENERATIONS_KEPT:
            self._generations.append((state.assignment.generation, now, now))
        elif before.phase is AgentPhase.RUNNING and self._generations:
            self._generations[-1] = (*self._generations[-1][:2], now)
        if isinstance(event, Stop):
            self._reason = event.decision.reason
        if isinstance(event, Ended) and state.assignment is not None and state.assignment.node_rank == 0:
            self._exporter.put(self._whole_job(event.outcome, state))

    def _whole_job(self, outcome: Outcome, state: Supervision) -> Sequence[TraceSpan]:
        attributes: dict[str, Value] = {
            "ddp.exit_code": outcome.exit_code,
            "ddp.restarts": outcome.restarts,
            "ddp.ranks": state.assignment.world_size if state.assignment is not None else 0,
        }
        if outcome.time is not None:
            attributes["ddp.goodput"] = outcome.time.spent.goodput
        error = "" if outcome.succeeded else outcome.reason
        agent = f"{state.agent.node} {state.agent.incarnation}"
        ran = tuple(traces.Ran(*each) for each in self._generations)
        job = traces.TracedJob(self._job, agent, self._began_s, time.time(), ran, attributes, error)
        return traces.of_job(job)

    def restarted(self, state: Supervision, moments: Sequence[float | None]) -> None:
        if state.assignment is None or state.store is None:
            return
        offset, mine = time.time() - time.monotonic(), state.assignment
        at = tuple(None if moment is None else moment + offset for moment in moments)
        node, store = (state.agent.node, mine.node_rank), f"{state.store.host}:{state.store.port}"
        restart = traces.TracedRestart(self._job, *node, mine.generation, store, self._reason, at)
        self._exporter.put(traces.of_restart(restart))

    def close(self) -> None:
        self._exporter.close()
