"""The traces of a job through a collector of somebody else, which understands them and sends them on."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launched import eventually
from ports import free_port
from test_otlp import TRAIN, Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launched import Launch

rotel = pytest.importorskip("rotel", reason="rotel, a collector, has no wheel for this machine")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytestmark = pytest.mark.nightly(instead="wings/otlp/test_otlp.py")


def decoded(body: bytes) -> Any:
    return trace_service.ExportTraceServiceRequest.FromString(gzip.decompress(body))


@pytest.fixture
def behind() -> Iterator[Collector]:
    """What the collector sends on arrives here, in the binary form of the protocol."""
    server = Collector()
    server.decode = decoded
    yield server
    server.shutdown()
    server.thread.join()
    server.server_close()


@pytest.fixture
def collector(behind: Collector, tmp_path: Path) -> Iterator[str]:
    """A running collector: its URL."""
    program = tmp_path / "rotel-agent"
    program.write_bytes((Path(rotel.__file__).parent / "rotel-agent").read_bytes())
    program.chmod(0o755)
    http, grpc = free_port(), free_port()
    words = [str(program), "start", "--otlp-http-endpoint", f"127.0.0.1:{http}"]
    words += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--exporter", "otlp"]
    words += ["--otlp-exporter-endpoint", behind.url, "--otlp-exporter-protocol", "http"]
    words += ["--otlp-exporter-compression", "gzip", "--batch-timeout", "50ms"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ROTEL_", "OTEL_"))}
    log = (tmp_path / "rotel.log").open("wb")
    with log, subprocess.Popen(words, env=env, stdout=log, stderr=log) as process:
        eventually(lambda: answers(http), what="the collector")
        yield f"http://127.0.0.1:{http}"
        process.kill()


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def spans(behind: Collector) -> list[Any]:
    return [
        span
        for _, body in behind.got
        for resource in body.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_a_collector_understands_the_traces(launch: Launch, collector: str, behind: Collector) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "traced")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_RESOURCE_ATTRIBUTES": "team=vision"}
    job = launch(*words, source=TRAIN, fake_torch="", env=env)
    eventually(lambda: any(span.name == "first step" for span in spans(behind)), 60.0)
    (job.there / "finish").touch()
    assert job.wait() == 0, job.stderr()
    assert "cannot export traces" not in job.stderr()
    eventually(lambda: any(span.name == "generation 2" for span in spans(behind)), 60.0)
    named = {span.name: span for span in spans(behind)}
    restart, of_job = named["restart"], named["job"]
    (of_node,) = (span for name, span in named.items() if name.startswith("restart "))
    assert (of_node.trace_id, of_node.parent_span_id) == (restart.trace_id, restart.span_id)
    for part in ("detect", "stop", "meet", "fork", "init", "first step"):
        span = named[part]
        assert (span.trace_id, span.parent_span_id) == (restart.trace_id, of_node.span_id)
        assert restart.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert restart.trace_id != of_job.trace_id == named["generation 1"].trace_id
    assert values(restart.attributes)["ddp.job"] == "traced"
    assert values(named["generation 2"].attributes)["ddp.generation"] == 2
    resource = values(behind.got[0][1].resource_spans[0].resource.attributes)
    assert (resource["service.name"], resource["team"]) == ("ddp-launch", "vision")
