"""Restarts and jobs as traces of OpenTelemetry, in the JSON form of OTLP. Pure.

A restart is a trace: its root is the restart of the job, with a span per node, which has a span for each part. Each
agent exports what its own node did. The agents do not talk about it: they compute equal identifiers from what they
know together, which are the job, the generation and the address of its store. The agent of node rank 0 exports the
root. At its end, the job is a trace too, exported by the agent of node rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from hashlib import sha256
from itertools import pairwise
from typing import Any

from rendezvous.values.late_dataclass import dataclass

Value = str | int | float | bool
_INTERNAL, _ERROR = 1, 2  # of OpenTelemetry: the kind of a span, and a status
PARTS = ("detect", "stop", "meet", "fork", "init", "first step")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    trace: str
    id: str
    parent: str  # "" for the root
    name: str
    begin_s: float  # since the epoch
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class TracedRestart:
    """A restart of one node. `moments`: since the epoch, the ends of the parts, with the beginning of the first one.

    None: it did not happen on this node.
    """

    job: str
    node: str
    node_rank: int
    generation: int
    store: str  # of the new generation
    reason: str
    moments: tuple[float | None, ...]


def _identifier(length: int, *words: object) -> str:
    """The same on all nodes of a job, and never zero in practice, which OpenTelemetry forbids."""
    return sha256("\0".join(map(str, words)).encode("utf-8", "surrogateescape")).hexdigest()[: 2 * length]


def of_restart(restart: TracedRestart) -> tuple[TraceSpan, ...]:
    known = [moment for moment in restart.moments if moment is not None]
    if not known:
        return ()
    common = (restart.job, restart.generation, restart.store)
    trace, root = _identifier(16, *common), _identifier(8, *common, "root")
    named: dict[str, Value] = {"ddp.job": restart.job, "ddp.generation": restart.generation}
    reason: dict[str, Value] = {"ddp.reason": restart.reason}
    on_node: dict[str, Value] = {"ddp.node": restart.node, "ddp.node_rank": restart.node_rank}
    of_node = _identifier(8, *common, restart.node)
    whole = (known[0], max(known))
    spans = [TraceSpan(trace, of_node, root, f"restart {restart.node}", *whole, named | on_node)]
    if restart.node_rank == 0:
        spans.insert(0, TraceSpan(trace, root, "", "restart", *whole, named | reason))
    for name, (begin, end) in zip(PARTS, pairwise(restart.moments), strict=True):
        if begin is not None and end is not None:
            own = _identifier(8, *common, restart.node, name)
            spans.append(TraceSpan(trace, own, of_node, name, begin, max(begin, end), on_node))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Ran:
    """A generation: from the start of its ranks to the order to stop, or the end."""

    generation: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TracedJob:
    name: str
    agent: str  # unique
    begin_s: float
    end_s: float
    generations: tuple[Ran, ...]
    attributes: Mapping[str, Value]
    error: str = ""


def of_job(job: TracedJob) -> tuple[TraceSpan, ...]:
    trace, root = (_identifier(length, job.name, job.agent, "job") for length in (16, 8))
    named: dict[str, Value] = {"ddp.job": job.name}
    spans = [
        TraceSpan(trace, root, "", "job", job.begin_s, job.end_s, named | dict(job.attributes), job.error)
    ]
    for ran in job.generations:
        own = _identifier(8, job.name, job.agent, ran.generation)
        numbered: dict[str, Value] = named | {"ddp.generation": ran.generation}
        spans.append(
            TraceSpan(trace, own, root, f"generation {ran.generation}", ran.begin_s, ran.end_s, numbered)
        )
    return tuple(spans)


# --- OTLP ------------------------------------------------------------------------------------------------


def payload(spans: Sequence[TraceSpan], resource: Mapping[str, Value], version: str) -> dict[str, Any]:
    """The body of an ExportTraceServiceRequest, as JSON: identifiers are hexadecimal, large numbers are strings."""
    scope = {"name": "ddp-launch", "version": version}
    of_scope = {"scope": scope, "spans": [_span(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [of_scope]}]}


def _span(span: TraceSpan) -> dict[str, Any]:
    shown = {
        "traceId": span.trace,
        "spanId": span.id,
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(int(span.begin_s * 1e9)),
        "endTimeUnixNano": str(int(max(span.begin_s, span.end_s) * 1e9)),
        "attributes": _attributes(span.attributes),
    }
    if span.parent:
        shown["parentSpanId"] = span.parent
    if span.error:
        shown["status"] = {"code": _ERROR, "message": span.error}
    return shown


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
