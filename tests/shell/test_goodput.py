"""What a real job says of its time: the classes add up to the wall clock, and a restart is in them part by part."""

from __future__ import annotations

import io
import json
import re
import time
import urllib.request
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import pytest
from launched import eventually
from served import serving

from rendezvous.control.ctl import main as ctl
from rendezvous.values.rank_time import CLASSES

if TYPE_CHECKING:
    from launched import Launch

TRAIN = """
import os, sys, time
from ddp.telemetry import status_page as s
time.sleep(0.5)  # its imports
page, rank = s.page(), os.environ["RANK"]
page.phase(s.IDLE)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
step = 0

def train():
    global step
    for phase, seconds in ((s.DATA, 0.01), (s.FORWARD, 0.02), (s.BACKWARD, 0.04), (s.OPTIMIZER, 0.01)):
        page.mark(phase)
        time.sleep(seconds)
    page.step()
    page.mark(s.IDLE)
    step += 1

for _ in range(10):
    train()
if rank == "0" and first:
    page.phase(s.CHECKPOINT)
    time.sleep(0.05)
    page.phase(s.IDLE)
for _ in range(5):
    train()
if first:
    if rank == "1":
        os._exit(3)
    page.mark(s.COMMUNICATE)
    time.sleep(60)
finish = os.path.join(os.environ["THERE"], "finish")
open(os.path.join(os.environ["THERE"], "trained-" + rank), "w").close()
while not os.path.exists(finish):
    train()
"""
SHARE = re.compile(r"(\w+) ([0-9.]+) %")


@pytest.mark.nightly(instead="core/test_time_ledger.py")
def test_a_job_says_what_its_time_was_spent_on(launch: Launch) -> None:
    with serving("--insecure", "--http", "127.0.0.1:0") as service:
        (metrics,) = [line.split("metrics at ")[1].strip() for line in service.log if "metrics at" in line]
        began = time.monotonic()
        words = (
            "--nproc-per-node",
            "2",
            "--rendezvous",
            service.endpoint,
            "--insecure",
            "--rdzv-id",
            "timed",
        )
        job = launch(*words, "--max-restarts", "1", "--nnodes", "1", source=TRAIN, fake_torch="")
        job.await_there("trained-0", "trained-1")
        spent = eventually(lambda: spent_by_the_job(service.endpoint))
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
            assert re.search(
                r'^ddp_rendezvous_job_goodput{job_id="timed"} 0\.\d', answer.read().decode(), re.M
            )
        (job.there / "finish").touch()
        assert job.wait() == 0, job.stderr()
        wall = time.monotonic() - began
    for rank in spent["ranks"]:
        assert sum(rank["spent"].values()) <= wall
        assert rank["spent"]["redo"] >= 5 * 0.08  # five steps after the checkpoint of rank 0
        assert rank["spent"]["forward"] >= 15 * 0.02
        assert rank["spent"]["backward"] >= 15 * 0.04
        # What the agent hears late of the new process belongs to "fork".
        assert rank["spent"]["fork"] + rank["spent"]["init"] >= 0.5
    whole = sum(spent["time"]["spent"].values())
    assert whole == pytest.approx(sum(sum(rank["spent"].values()) for rank in spent["ranks"]))
    assert "goodput" not in job.stderr()  # of a job that was mostly its start
    line = next(line for line in spent["text"].splitlines() if "goodput" in line)
    shares, lost, rest = re.split(r" \(|\)", line.split(": ", 1)[1])
    assert sum(float(share) for _, share in SHARE.findall(shares + rest)) == pytest.approx(100.0, abs=1.0)
    parts = {name for name, _ in SHARE.findall(lost)}
    assert {"detect", "redo"} <= parts
    assert parts & {"fork", "init"}


def spent_by_the_job(endpoint: str) -> Any:
    """The times of the job, after the restart was reported."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        assert ctl(["--rendezvous", endpoint, "status", "timed"]) == 0
    text = shown.getvalue()
    if "redo" not in text:
        return None
    shown = io.StringIO()
    with redirect_stdout(shown):
        ctl(["--rendezvous", endpoint, "get", "timed"])
    job = json.loads(shown.getvalue())
    found = all(rank["spent"]["redo"] >= 0.4 for rank in job["ranks"])
    assert set(job["time"]["spent"]) == set(CLASSES)
    return {**job, "text": text} if found else None
