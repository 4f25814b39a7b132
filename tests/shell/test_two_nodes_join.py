"""Two agents of one job, the first of which serves the rendezvous in its own process."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch, Launched

TRAIN = """
import os, sys, time
restart, rank, fails = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), int(sys.argv[1])
print("restart", restart, "rank", rank, "of", os.environ["WORLD_SIZE"], "node", os.environ["GROUP_RANK"], flush=True)
if restart == 0 and rank == fails:
    raise ValueError("the third rank's own mistake")
if restart == 0 and fails >= 0:
    time.sleep(600)  # as who waits for the third rank does
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def node(launch: Launch, port: int, *words: str, named: bool = True) -> Launched:
    where = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}")
    where += ("--rdzv-id", f"job-{port}") if named else ()
    return launch(*where, "--nproc-per-node", "2", *words, fake_torch="")


def pair(launch: Launch, port: int, *words: str) -> tuple[Launched, Launched]:
    return node(launch, port, *words), node(launch, port, *words)


def test_a_log_tells_what_the_job_waits_for_until_it_is_there(launch: Launch, port: int, script: str) -> None:
    words = "waiting for 1 more node (1 of 2 nodes have joined), for 2 s so far"
    first = node(launch, port, script, "-1")
    eventually(lambda: words in first.stderr())
    second = node(launch, port, script, "-1")
    assert [first.wait(), second.wait()] == [0, 0], first.stderr() + second.stderr()
    assert "waiting" not in second.stderr()


def test_two_agents_form_one_world(launch: Launch, port: int, script: str) -> None:
    nodes = [node(launch, port, script, "-1", named=False) for _ in range(2)]
    assert [each.wait() for each in nodes] == [0, 0], [each.stderr() for each in nodes]
    user = getpass.getuser()
    assert all(
        f"this node joins the job {user}-train, named after the user" in each.stderr() for each in nodes
    )
    said = "".join(each.stdout() for each in nodes)
    assert sorted(line.partition("] ")[2] for line in said.splitlines()) == [
        f"restart 0 rank {rank} of 4 node {rank // 2}" for rank in range(4)
    ]
    for each in nodes:
        each.assert_nothing_left()


def test_no_place_to_meet_names_three_things_to_try(launch: Launch) -> None:
    job = launch("--nnodes", "2", source=TRAIN)
    assert job.wait() == 2
    assert "--rendezvous HOST:PORT" in job.stderr()
    job.assert_nothing_left()


def test_an_open_port_beyond_loopback_must_be_asked_for(launch: Launch) -> None:
    job = launch("--nnodes", "2", "--rendezvous", "0.0.0.0:29400", source=TRAIN)
    assert job.wait() == 2
    assert all(name in job.stderr() for name in ("--rendezvous '0.0.0.0:29400'", "--secret-file"))
