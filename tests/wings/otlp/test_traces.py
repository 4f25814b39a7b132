"""Restarts and jobs as traces: all nodes write into one trace, in the JSON form of OTLP."""

from __future__ import annotations

import re

import pytest

from ddp_launch_wings.otlp.exporter import endpoint
from ddp_launch_wings.otlp.traces import Ran, TracedJob, TracedRestart, TraceSpan, of_job, of_restart, payload

MOMENTS = (100.0, 101.0, 102.5, 103.0, 103.25, 105.0, 106.0)


def restart_of_traces(node_rank: int, moments: tuple[float | None, ...] = MOMENTS) -> TracedRestart:
    return TracedRestart("train", f"node{node_rank}", node_rank, 3, "node0:29500", "rank 5 failed", moments)


def test_a_restart_is_one_trace_of_all_nodes() -> None:
    first, second = of_restart(restart_of_traces(0)), of_restart(restart_of_traces(1))
    assert len({span.trace for span in (*first, *second)}) == 1
    root, node, *parts = first
    assert (root.name, root.parent, root.begin_s, root.end_s) == ("restart", "", 100.0, 106.0)
    assert root.attributes["ddp.reason"] == "rank 5 failed"
    assert [span.name for span in parts] == ["detect", "stop", "meet", "fork", "init", "first step"]
    assert [span.begin_s for span in parts] == list(MOMENTS[:-1])
    assert {span.parent for span in parts} == {node.id}
    assert {node.parent, second[0].parent} == {root.id}
    assert len({span.id for span in (*first, *second)}) == 8 + 7
    other = of_restart(TracedRestart("train", "node0", 0, 4, "node0:29500", "", MOMENTS))
    assert other[0].trace != root.trace


def test_a_node_that_did_not_see_the_failure_begins_with_the_stop() -> None:
    _, node, *parts = of_restart(restart_of_traces(0, (None, *MOMENTS[1:])))
    assert node.begin_s == 101.0
    assert parts[0].name == "stop"
    assert of_restart(restart_of_traces(0, (None,) * 7)) == ()


def test_a_job_is_a_trace() -> None:
    job = TracedJob(
        "train",
        "node0 1",
        10.0,
        90.0,
        (Ran(1, 12.0, 40.0), Ran(2, 44.0, 90.0)),
        {"ddp.exit_code": 1},
        "no restarts left",
    )
    root, *generations = of_job(job)
    assert (root.name, root.error, root.attributes["ddp.job"]) == ("job", "no restarts left", "train")
    assert [span.name for span in generations] == ["generation 1", "generation 2"]
    assert {span.parent for span in generations} == {root.id}


def test_the_json_of_otlp() -> None:
    span = TraceSpan(
        "ab" * 16, "cd" * 8, "ef" * 8, "stop", 1.5, 1.25, {"n": 3, "yes": True, "x": 0.5, "s": "t"}, "failed"
    )
    body = payload([span], {"service.name": "ddp-launch"}, "1.0")
    (resource,) = body["resourceSpans"]
    assert resource["resource"]["attributes"] == [
        {"key": "service.name", "value": {"stringValue": "ddp-launch"}}
    ]
    (shown,) = resource["scopeSpans"][0]["spans"]
    assert re.fullmatch("[0-9a-f]{32}", shown["traceId"])
    assert (shown["startTimeUnixNano"], shown["endTimeUnixNano"]) == ("1500000000", "1500000000")
    assert [each["value"] for each in shown["attributes"]] == [
        {"intValue": "3"},
        {"boolValue": True},
        {"doubleValue": 0.5},
        {"stringValue": "t"},
    ]
    assert shown["status"] == {"code": 2, "message": "failed"}
    assert (
        "parentSpanId"
        not in payload([TraceSpan("a", "b", "", "root", 0.0, 1.0)], {}, "1")["resourceSpans"][0][
            "scopeSpans"
        ][0]["spans"][0]
    )


@pytest.mark.parametrize(
    ("asked", "environ", "url"),
    [
        ("", {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        ("", {"ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ("", {"ENDPOINT": "http://c:4318", "TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ("http://mine", {"TRACES_ENDPOINT": "http://t/x", "PROTOCOL": "grpc"}, "http://mine/v1/traces"),
    ],
)
def test_the_endpoint(asked: str, environ: dict[str, str], url: str | None) -> None:
    found, problem = endpoint(asked, {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environ.items()})
    assert problem == ""
    assert (found.url if found else None) == url


def test_variables_of_opentelemetry() -> None:
    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    found, _ = endpoint(
        "", base | {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, a=b", "OTEL_SERVICE_NAME": "llm"}
    )
    assert found is not None
    assert found.headers == {"authorization": "Bearer x", "a": "b"}
    assert found.resource == {"service.name": "llm"}
    assert endpoint("", base | {"OTEL_SDK_DISABLED": "true"}) == (None, "")
    assert endpoint("", base | {"OTEL_TRACES_EXPORTER": "none"}) == (None, "")
    assert "4318" in endpoint("", base | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})[1]
    assert endpoint("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})[1]
