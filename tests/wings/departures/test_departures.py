"""Announcements that a node leaves, as clouds, Kubernetes and Slurm write them, and what a job does then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from launched import eventually
from test_node_trouble import Job, await_generation, job, service

from ddp_launch_wings.departures import notices
from ddp_launch_wings.departures.command import DepartureWatch
from ddp_launch_wings.departures.notices import Departure, NotRead, checkpoint_wait_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launched import Launch

__all__ = ["job", "service"]  # fixtures
NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z


def node(**spec: object) -> str:
    return json.dumps({"kind": "Node", "spec": spec})


AZURE = {"EventType": "Preempt", "NotBefore": "Thu, 01 Jan 2026 00:00:30 GMT"}
LATER = {"EventType": "Reboot", "NotBefore": "Thu, 01 Jan 2026 00:05:00 GMT"}


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (
            "ec2",
            '{"action": "terminate", "time": "2026-01-01T00:02:00Z"}',
            Departure("spot notice: terminate", 120.0),
        ),
        ("ec2", '{"action": "none"}', None),
        ("gcp", "TRUE\n", Departure("preempted", 30.0)),
        ("gcp", "FALSE", None),
        ("azure", json.dumps({"Events": [LATER, AZURE]}), Departure("scheduled event: Preempt", 30.0)),
        ("azure", json.dumps({"Events": [{"EventType": "Freeze"}]}), None),
        ("kubernetes", node(unschedulable=True), Departure("the node is cordoned")),
        (
            "kubernetes",
            node(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]),
            Departure("taint karpenter.sh/disrupted"),
        ),
        (
            "kubernetes",
            node(taints=[{"key": "node.kubernetes.io/memory-pressure"}, {"key": "nvidia.com/gpu"}]),
            None,
        ),
        ("kubernetes", node(), None),
        (
            "slurm",
            "NodeName=n1 Arch=x86\n   State=ALLOCATED+DRAIN ThreadsPerCore=1\n   Reason=bad fan [root@now]\n",
            Departure("Slurm: ALLOCATED+DRAIN (bad fan [root@now])"),
        ),
        ("slurm", "NodeName=n1\n   State=ALLOCATED ThreadsPerCore=1\n", None),
        ("own", '{"departs": "the rack\\nis moved", "in_s": 90}', Departure("the rack is moved", 90.0)),
        ("own", '{"departs": "soon"}', Departure("soon")),
        ("own", "{}", None),
    ],
)
def test_an_announcement_is_read(source: str, text: str, expected: Departure | None) -> None:
    read = notices.own if source == "own" else notices.READERS[source]
    assert read(text, NOW) == expected


@pytest.mark.parametrize("source", ["own", "ec2", "azure", "kubernetes", "slurm"])
@pytest.mark.parametrize("text", ["<html>", "[]", "[" * 100_000, "null"])
def test_what_is_not_in_its_format_announces_nothing(source: str, text: str) -> None:
    read = notices.own if source == "own" else notices.READERS[source]
    with pytest.raises(NotRead):
        read(text, NOW)


def test_the_end_of_a_slurm_job_is_announced_in_time() -> None:
    end = str(int(NOW) + 300)
    assert notices.slurm_end(end, 120.0, NOW) is None
    over = notices.slurm_end(end, 120.0, NOW + 200)
    assert over == Departure("the time limit of the Slurm job", 100.0, is_of_job=True)
    assert [checkpoint_wait_s(each) for each in (over, Departure("", 30.0), Departure(""))] == [
        60.0,
        15.0,
        60.0,
    ]


class Cloud(HTTPServer):
    """Metadata services: what they say, and what they want to be asked with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.says: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Asked(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        says = self.server.says.get(self.path)  # type: ignore[attr-defined]
        wants = {"/latest/spot": ("X-aws-ec2-metadata-token", "t"), "/events": ("Metadata", "true")}.get(
            self.path
        )
        is_refused = wants is not None and self.headers.get(wants[0]) != wants[1]
        self._answer(401 if is_refused else 200 if says is not None else 404, says or "")

    def do_PUT(self) -> None:
        self._answer(200, "t")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_metadata_services_are_asked(cloud: Cloud) -> None:
    sources = [f"ec2={cloud.url}/latest/spot", f"azure={cloud.url}/events", f"{cloud.url}/own"]
    watch = DepartureWatch(sources, 120.0, {})
    assert watch.look(NOW) is None
    cloud.says["/events"] = json.dumps({"Events": [AZURE]})
    assert watch.look(NOW) == Departure("scheduled event: Preempt", 30.0)
    cloud.says["/latest/spot"] = '{"action": "stop", "time": "2026-01-01T00:02:00Z"}'
    assert watch.look(NOW) == Departure("spot notice: stop", 120.0)


def test_a_source_that_does_not_answer_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cloud: Cloud
) -> None:
    broken, own = tmp_path / "broken", tmp_path / "own"
    broken.write_text("<html>")
    watch = DepartureWatch([str(broken), str(own)], 120.0, {})
    assert watch.look(NOW) is watch.look(NOW) is None
    assert capsys.readouterr().err.count("does not say whether this node leaves") == 1
    own.write_text('{"departs": "soon"}')
    assert watch.look(NOW) == Departure("soon")


def test_slurm_is_asked_about_the_node_and_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "NodeName=$3 State=ALLOCATED+DRAIN Reason=$3 is old"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {"SLURMD_NODENAME": "n7", "SLURM_JOB_END_TIME": str(int(NOW) + 300)}
    assert DepartureWatch(["slurm"], 120.0, environ).look(NOW) == Departure(
        "Slurm: ALLOCATED+DRAIN (n7 is old)"
    )
    ends = DepartureWatch(["slurm"], 301.0, environ).look(NOW)
    assert ends is not None
    assert ends.is_of_job


def depart(endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from _ddp_launch_entry import ddpctl; sys.exit(ddpctl())"
    command = [sys.executable, "-c", program, "--rendezvous", endpoint, "depart", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_unknown_source_is_refused() -> None:
    done = depart("127.0.0.1:1", "--source", "moon")
    assert (done.returncode, "'moon' is not a source" in done.stderr) == (2, True)


# Counts steps, and answers a request for a checkpoint with the step that it has saved.
_STEPS = """
import os, time
request, rank, there = os.environ["DDP_CHECKPOINT_REQUEST"], os.environ["RANK"], os.environ["SHARED"]
open(f"{request}.watched.{rank}", "w").close()
saved = os.path.join(there, "saved")
step = int(open(saved).read()) if os.path.exists(saved) else 0
name = os.path.join(os.environ["THERE"], f"{os.environ['DDP_GENERATION']}-{rank}")
with open(name + ".part", "w") as file:
    file.write(str(step))
os.rename(name + ".part", name)
while not os.path.exists(os.environ["FINISH"]):
    step += 1
    if os.path.exists(request) and not os.path.exists(f"{request}.done.{rank}"):
        if rank == "0":
            with open(saved + ".part", "w") as file:
                file.write(str(step))
            os.rename(saved + ".part", saved)
        open(f"{request}.done.{rank}", "w").close()
    time.sleep(0.02)
"""


def test_a_node_that_leaves_gives_its_place_to_a_spare_after_a_checkpoint(
    launch: Launch, job: Job, service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED", str(tmp_path))
    job.script.write_text(_STEPS)
    words = ("--nnodes", "2", "--spares", "1")
    first, second = job.node(*words), job.node(*words)
    await_generation((first, second), 1, 2)
    spare = job.node(*words)
    eventually(lambda: "the node waits as a spare" in spare.stderr(), what="the spare says what it is")
    notice = tmp_path / "notice"
    notice.write_text('{"departs": "maintenance", "in_s": 60}')
    program = "import sys; from _ddp_launch_entry import ddpctl; sys.exit(ddpctl())"
    asked = [sys.executable, "-c", program, "--rendezvous", service.endpoint, "get", "trouble", "-o", "json"]
    nodes = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)["nodes"]
    leaving = next(each["node"] for each in nodes if each.get("node_rank") == 1)
    done = depart(service.endpoint, "trouble", leaving, "--source", str(notice))
    assert done.returncode == 0, done.stderr
    assert "leaves in 60 s: maintenance" in done.stderr
    await_generation((first, second, spare), 2, 2)
    assert int((tmp_path / "saved").read_text()) > 0
    assert "draining" in first.stderr() + second.stderr() + spare.stderr()
    job.end.touch()
    assert first.wait() == 0, first.stderr()
