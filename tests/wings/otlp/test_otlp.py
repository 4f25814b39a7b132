"""A job with a restart, seen by a collector, by Prometheus and by a command for events."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

from launched import eventually
from ports import free_port

from ddp_launch_wings.otlp.exporter import Exporter, OtlpEndpoint
from ddp_launch_wings.otlp.traces import TraceSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from launched import Launch

import pytest


class Collector(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receives)
        self.got: list[tuple[str, Any]] = []
        self.decode: Callable[[bytes], Any] = json.loads
        self.answers = [200]
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [
            span
            for _, body in self.got
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


class Receives(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.server.decode(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, body))
        answers = self.server.answers
        self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()
    server.thread.join()
    server.server_close()


ABOUT_THE_MACHINE = ("notice", "node")  # a busy one has them under any script
TRAIN = """
import os, time
from ddp.telemetry import status_page as s
page = s.page()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("bad batch")
finish = os.path.join(os.environ["THERE"], "finish")
while not os.path.exists(finish):
    page.mark(s.FORWARD)
    time.sleep(0.02)
    page.mark(s.OPTIMIZER)
    page.step()
"""


def test_a_restart_and_a_job_are_traces_and_figures(
    launch: Launch, collector: Collector, tmp_path: Path
) -> None:
    port, events = free_port(), tmp_path / "events"
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--otlp-endpoint", collector.url)
    more = ("--health-port", str(port), "--on-event", f"cat >> {events}")
    job = launch(*words, *more, source=TRAIN, fake_torch="")
    eventually(lambda: any(span["name"] == "first step" for span in collector.spans), 60.0)
    eventually(lambda: 'ddp_launch_restart_duration_seconds_count{part="all"} 1' in figures_at(port))
    figures = figures_at(port)
    assert 'ddp_launch_restart_duration_seconds_count{part="first_step"} 1' in figures
    assert 'ddp_launch_time_seconds{rank="1",class="forward"}' in figures
    (job.there / "finish").touch()
    assert job.wait() == 0, job.stderr()
    assert {path for path, _ in collector.got} == {"/v1/traces"}
    names = [span["name"] for span in collector.spans]
    assert names[:1] == ["restart"]
    assert names[2:-3] == ["detect", "stop", "meet", "fork", "init", "first step"]
    assert names[-3:] == ["job", "generation 1", "generation 2"]
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in collector.spans)
    told = [json.loads(line) for line in events.read_text().splitlines()]
    told = [event for event in told if event["event"] not in ABOUT_THE_MACHINE]
    assert [event["event"] for event in told] == ["started", "stopping", "restarted", "ended"], job.stderr()
    assert set(told[2]["seconds"]) == {"detect", "stop", "meet", "fork", "init", "first_step"}


def figures_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


SPAN = TraceSpan("ab" * 16, "cd" * 8, "", "restart", 1.0, 2.0)


def test_an_endpoint_that_is_busy_is_tried_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_launch_wings.otlp.exporter._PAUSE_S", 0.0)
    collector.answers = [503, 200]
    said: list[str] = []
    exporter = Exporter(OtlpEndpoint(f"{collector.url}/v1/traces", {}, {}), said.append)
    exporter.put([SPAN])
    exporter.close()
    assert (len(collector.got), said) == (2, [])


def test_an_endpoint_that_fails_costs_one_line(collector: Collector) -> None:
    collector.answers = [400]
    said: list[str] = []
    exporter = Exporter(OtlpEndpoint(f"{collector.url}/v1/traces", {}, {}), said.append)
    for _ in range(3):
        exporter.put([SPAN])
    exporter.close()
    assert len(collector.got) == 3  # what is wrong with it is not tried again
    (line,) = said
    assert "it answered 400" in line
