"""Timers of torch.distributed.elastic, with torch's own client in the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from launcher.health.node_watch import RankTimers, Timer, parse_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launched import Launch

SETS_TIMERS = """
import json, os, time
from torch.distributed.elastic import timer
path = os.environ["TORCHELASTIC_TIMER_FILE"]
timer.configure(timer.FileTimerClient(path))
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with timer.expires(after=0.0 if rank == "1" and restart == "0" else 600.0, scope="step"):
    if rank == "1" and restart == "0":
        time.sleep(600)
with timer.expires(after=0.0, client=timer.FileTimerClient(path, signal=0), scope="look"):  # only told of
    pass
with open(path, "w") as pipe:
    bystander = {"pid": int(os.environ["BYSTANDER"]), "scope_id": "x", "expiration_time": 0, "signal": 9}
    for line in ("", "[]", "{", json.dumps(bystander)):
        pipe.write(line + "\\n")
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(("sleep", "600")) as process:
        yield process
        process.kill()


def test_a_rank_whose_timer_runs_out_is_ended_and_the_job_goes_on(
    launch: Launch, bystander: subprocess.Popen[bytes]
) -> None:
    """As a script finds it under torchrun, which would end itself along with the rank."""
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "BYSTANDER": str(bystander.pid)}
    job = launch("--nproc-per-node", "2", "--max-restarts", "1", "SCRIPT", source=SETS_TIMERS, env=env)
    assert job.wait(120) == 0, job.stderr()
    assert (
        'rank 1: timer "step" (torch.distributed.elastic.timer) expired; its process got SIGKILL\n'
        in job.stderr()
    )
    assert job.stderr().count('"step"') == 1
    assert bystander.poll() is None, "a process that is not of the job"


def test_a_pipe_that_cannot_be_made_is_named(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "timers"
    path.write_text("somebody's")
    env = {"TORCHELASTIC_TIMER_FILE": str(path)}
    source = "import os; print(os.environ['TORCHELASTIC_TIMER_FILE'])"
    job = launch("--rank-timers", source=source, env=env, fake_torch="")
    assert job.wait(120) == 0, job.stderr()
    assert (
        f"--rank-timers: cannot create the pipe {path}: File exists; the job continues without"
        in job.stderr()
    )
    assert job.stdout().endswith(f"{path}\n")
    assert path.read_text() == "somebody's"


@pytest.mark.parametrize(
    ("line", "timer"),
    [
        (b'{"pid": 7, "scope_id": "a", "expiration_time": 1.5, "signal": 9}', Timer(7, "a", 1.5, 9)),
        (
            b'{"version": 1, "pid": 7, "scope_id": "a", "expiration_time": -1, "signal": 0}',
            Timer(7, "a", -1.0, 0),
        ),
        (b'{"pid": 7, "scope_id": "a", "expiration_time": 1, "signal": -9}', Timer(7, "a", 1.0, 0)),
        (b'{"pid": 7, "scope_id": "a", "expiration_time": 1, "signal": 9999}', None),
        (b'{"pid": -7, "scope_id": "a", "expiration_time": 1, "signal": 9}', None),
        (b'{"pid": 1e999, "scope_id": "a", "expiration_time": 1, "signal": 9}', None),
        (b'{"pid": 7, "scope_id": "a", "expiration_time": null, "signal": 9}', None),
        (b'{"pid": 7, "scope_id": "a", "signal": 9}', None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b"7", None),
        (b"", None),
    ],
)
def test_what_a_rank_says(line: bytes, timer: Timer | None) -> None:
    assert parse_line(line) == timer


def test_a_timer_may_come_before_the_report_that_its_rank_has_started(tmp_path: Path) -> None:
    """As with a zygote of the pool, which is no child of the agent."""
    orphan = int(
        subprocess.run(
            ("sh", "-c", "sleep 600 >/dev/null & echo $!"), stdout=subprocess.PIPE, check=True
        ).stdout
    )
    line = json.dumps({"pid": orphan, "scope_id": "x", "expiration_time": 1, "signal": 9}) + "\n"
    path = tmp_path / "timers"

    async def expired() -> Timer:
        ranks, first = list[int](), asyncio.get_running_loop().create_future()
        timers = RankTimers(str(path), first.set_result, lambda: ranks)
        try:
            path.write_text(line)
            asyncio.get_running_loop().call_later(0.1, ranks.append, orphan)
            return await asyncio.wait_for(first, 60)
        finally:
            timers.close()

    try:
        assert asyncio.run(expired()).pid == orphan
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
