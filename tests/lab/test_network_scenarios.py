"""What happens when nodes are there and the network is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from lab_host import eventually
from lab_job import LONG_S, PORT, Job, Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_a_link_is_cut_for_long",
        "lab/test_lab.py",
        "shell/test_node_trouble.py::test_nodes_that_cannot_talk_are_named_to_everybody",
    )
)

HEALED = (
    "ddp-launch: rank 1 on {}: ValueError: the batch is bad; restarting with the same nodes (restart 1 of 1)"
)


@NIGHTLY
def test_a_link_is_cut_for_two_seconds(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nothing happens: training waits for what TCP sends again, and goes on."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    job = Job(made, tmp_path, service.endpoint, "--nnodes", "2")
    job.start(*made.hosts[:2])
    job.await_world(2)
    # Right after a sign of life: else the silence would have lasted for up to a second before the two begin.
    made.await_packet(made.hosts[1], service.host)
    made.cut(made.hosts[1])
    time.sleep(2.0)
    made.mend(made.hosts[1])
    job.await_steps()
    assert job.finish() == [0, 0], job
    assert job.generation == 1
    assert job.story() == []
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@pytest.mark.parametrize("for_s", [5.0, pytest.param(60.0, marks=pytest.mark.nightly)])
def test_a_link_is_cut_for_long(lab: Build, tmp_path: Path, undisturbed: Undisturbed, for_s: float) -> None:
    """The node is given up, and is part of the job again as soon as it can be."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    words = ("--nnodes", "2", "--max-restarts", "1", "--replacement-timeout", "120")
    job = Job(made, tmp_path, service.endpoint, *words)
    job.start(*made.hosts[:2])
    job.await_world(2)
    made.cut(made.hosts[1])
    time.sleep(for_s)
    eventually(job.agents[0].said, what="the node was given up")
    made.mend(made.hosts[1])
    job.await_world(2, after=1)
    job.await_steps()
    assert job.finish() == [0, 0], job
    lost = "ddp-launch: node node1 was lost: no heartbeat for 4 s; "
    assert job.story(job.agents[0])[0].startswith(f"{lost}waiting")
    assert job.reason(job.agents[0]).startswith(lost)
    assert job.generation == 2
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_two_nodes_cannot_reach_each_other(lab: Build, tmp_path: Path) -> None:
    """Both reach the service, as behind a firewall that was opened for that only."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    made.shape(made.hosts[0], made.hosts[1], up=False)
    job = Job(made, tmp_path, service.endpoint, "--nnodes", "2")
    agents = job.start(*made.hosts[:2])
    assert job.exit_codes(*agents) == [75, 75], job
    (cause,) = {agent.first_cause() for agent in agents}
    assert "node1 cannot connect to the store of generation " in cause
    assert "(store of generation 1): no answer within 5 s" in cause
    job.assert_nothing_left()


@NIGHTLY
def test_a_partition_in_halves(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The half with the service goes on; the other does nothing of its own, and comes back."""
    made = lab(4, "service")
    service = Service(made.hosts[4], tmp_path)
    words = ("--nnodes", "2:4", "--last-call", "20", "--max-restarts", "1", "--scale-up", "immediate")
    job = Job(made, tmp_path, service.endpoint, *words, "--isolation-timeout", "5")
    job.start(*made.hosts[:4])
    cut_off = [rank for rank in job.await_world(4).values() if rank.host in ("node2", "node3")]
    with_service, without = made.hosts[:2], made.hosts[2:4]
    made.partition([*with_service, service.host], without)
    ranks = job.await_world(2, after=1)
    assert {rank.host for rank in ranks.values()} == {"node0", "node1"}
    job.await_steps()
    lost = {"node node2 was lost", "node node3 was lost"}  # at the same moment, or the one after the other
    story = job.story(*job.agents[:2])
    assert {line.removeprefix("ddp-launch: ").partition(":")[0] for line in story} <= lost, story
    assert "continuing with 2 of 4 nodes (restart 1 of 1)" in story[-1]
    eventually(lambda: not any(job.runs(rank) for rank in cut_off), LONG_S, "the other half stopped")
    made.heal()
    job.await_world(4, after=job.generation)
    job.await_steps()
    assert job.finish() == [0, 0, 0, 0], job
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_slow_and_lossy_network(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Every tenth packet lost, 20 ms of delay, 10 Mbit/s: slower, and otherwise the same."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    for other in (made.hosts[0], service.host):
        made.shape(made.hosts[1], other, loss=0.1, delay_s=0.02, jitter_s=0.01, rate=1e7)
    job = Job(made, tmp_path, service.endpoint, "--nnodes", "2", "--max-restarts", "1")
    job.start(*made.hosts[:2])
    job.await_world(2)
    job.order(1, "raise the batch is bad")
    job.await_world(2, after=1)
    job.await_steps()
    assert job.finish() == [0, 0], job
    assert job.reason() == HEALED.format(job.host_of(1))
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_network_of_ipv6_alone(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    made = lab(2)
    for host in made.hosts:
        host.run("ip", "-4", "address", "flush", "dev", "eth0")
    made.name_by_version(6)
    job = Job(made, tmp_path, f"[fd77::1]:{PORT}", "--nnodes", "2", "--max-restarts", "1")
    job.start(*made.hosts)
    job.await_world(2)
    job.order(1, "raise the batch is bad")
    ranks = job.await_world(2, after=1)
    assert {rank.store for rank in ranks.values()} == {"fd77::1"}
    assert job.finish() == [0, 0], job
    assert job.reason() == HEALED.format(job.host_of(1))
    job.assert_curve(undisturbed)
    job.assert_nothing_left()
