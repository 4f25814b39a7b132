"""A peer dies, or somebody fails elsewhere: who waits in a collective comes back to Python, and hears why."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from launched import Launch, Launched

# Ranks wait until their guards know each other; SIGTERM is left out of what is looked at, unless a test is about it.
START = """
import ctypes, datetime, json, os, signal, sys, threading, time
import torch, torch.distributed as dist
RANK, THERE = int(os.environ["RANK"]), os.environ["THERE"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def there(name, said=""):
    path = os.path.join(THERE, f"{name}-{RANK}")
    with open(path + ".part", "w") as file:
        json.dump(said, file)
    os.rename(path + ".part", path)

def await_there(*names):
    deadline = time.monotonic() + 60
    while not all(os.path.exists(os.path.join(THERE, name)) for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.005)

def await_acquaintance():
    guard, deadline = sys.modules["_ddp_guard"], time.monotonic() + 60
    while guard.running() is None or len(guard.running().peers._known) < dist.get_world_size() - 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)

def describe(error):
    said = {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
    for name in ("cause", "peer_rank", "peer_host", "collective", "sequence", "bucket", "parameters"):
        said[name] = getattr(error, name, None)
    said["chained"] = str(error.__cause__)
    there("error", said)
"""
WITH_DDP = (
    START
    + """
import ddp
ddp.init(os.environ["BACKEND"])
await_acquaintance()
"""
)
LAST_DIES = """
there("ready")
if RANK == 2:
    await_there("ready-0", "ready-1")
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def errors(job: Launched, *ranks: int) -> list[Any]:
    job.await_there(*(f"error-{rank}" for rank in ranks))
    return [json.loads((job.there / f"error-{rank}").read_text()) for rank in ranks]


def assert_one_names_the_last(told: list[Any]) -> None:
    """Whoever of the survivors left first knows; the other may have seen both go at the same moment."""
    assert any(said["peer_rank"] == 2 or "rank 2 on" in said["cause"] for said in told), told


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.nightly)])
def test_a_bucket_that_fails_names_the_peer_and_its_parameters(launch: Launch, backend: str) -> None:
    source = (
        WITH_DDP
        + "model = ddp.DistributedDataParallel(torch.nn.Linear(8, 2))\n"
        + "for _ in range(3): model(torch.ones(1, 8)).sum().backward()\n"
        + LAST_DIES
        + "try:\n    model(torch.ones(1, 8)).sum().backward()\nexcept RuntimeError as error:\n"
        + "    describe(error)\n    raise\n"
    )
    # The wrapper imports it, which takes longer than all the rest: once is enough.
    words = ("--nproc-per-node", "3", "--preload", "torch._dynamo")
    job = launch(*words, source=source, env={"BACKEND": backend})
    told = errors(job, 0, 1)
    assert_one_names_the_last(told)
    for said in told:
        assert said["type"] == "CommError", said
        assert said["peer_host"]
        assert said["bucket"] == 0
        assert sorted(said["parameters"]) == ["bias", "weight"]
        assert said["chained"]
    assert job.wait() == 137, job.stderr()
    assert job.failure()["first_cause"]["rank"] == 2


@pytest.mark.nightly(instead="::test_a_bucket_that_fails_names_the_peer_and_its_parameters")
@pytest.mark.parametrize("start", [(), ("--no-warm-start",)], ids=["warm", "plain"])
def test_a_script_without_our_library_gets_torchs_error_with_a_note(
    launch: Launch, start: tuple[str, ...]
) -> None:
    source = (
        START + "dist.init_process_group('gloo')\nawait_acquaintance()\n" + LAST_DIES + "try:\n"
        "    dist.all_reduce(torch.ones(4))\nexcept RuntimeError as error:\n    describe(error)\n    raise\n"
    )
    job = launch("--nproc-per-node", "3", *start, source=source)
    told = errors(job, 0, 1)
    for said in told:
        assert said["type"] == "RuntimeError"
        assert "gloo" in said["text"]
        (note,) = said["notes"]
        assert note.startswith("all_reduce #1 "), note
    assert any("rank 2 " in said["notes"][0] for said in told), told
    assert job.wait() == 137, job.stderr()


def test_who_never_comes_to_form_the_group_is_named(launch: Launch) -> None:
    source = (
        "import datetime, os, time\n"
        "import torch.distributed as dist\n"
        "if os.environ['RANK'] == '1': time.sleep(600)\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=6))\n"
    )
    job = launch("--nproc-per-node", "3", source=source)
    assert job.wait() == 124, job.stderr()
    cause = job.failure()["first_cause"]
    assert (cause["rank"], cause["doubt"]) == (1, None)
    assert re.search(r"ranks 0 and 2 .* init_process_group #1", cause["reason"])


OWN_CONNECTION = """
import os, signal, time
from multiprocessing.connection import Client, Listener
path = os.path.join(os.environ["THERE"], "line")
if os.environ["RANK"] == "1":
    with Listener(path) as listener, listener.accept() as line:
        line.recv()
        os.kill(os.getpid(), signal.SIGKILL)
while True:
    try:
        line = Client(path)
        break
    except OSError:
        time.sleep(0.01)
line.send("here I am")
line.recv()
"""


def test_a_rank_that_loses_a_connection_of_its_own_is_a_consequence(launch: Launch) -> None:
    job = launch("--nproc-per-node", "2", source=OWN_CONNECTION, fake_torch="")
    assert job.wait() == 137, job.stderr()
    report = job.failure()
    assert report["first_cause"]["rank"] == 1
    assert [cause["class"] for cause in report["causes"]] == ["signal", "consequence"]
