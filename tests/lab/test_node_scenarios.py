"""What happens when a whole node is lost: its processes and its link at once, without a word to anybody."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from lab_job import Job, Service

from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

NIGHTLY = pytest.mark.nightly(instead="::test_the_node_of_rank_0_and_the_store_is_powered_off")


def three_nodes(lab: Build, folder: Path) -> Job:
    """Two are enough. The service has a host of its own."""
    made = lab(3, "service")
    service = Service(made.hosts[3], folder)
    job = Job(made, folder, service.endpoint, "--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1")
    job.start(*made.hosts[:3])
    job.await_world(3)
    return job


def assert_goes_on_without(job: Job, lost: int, undisturbed: Undisturbed) -> None:
    made = job.lab
    job.await_steps()
    made.power_off(made.hosts[lost])
    left = [agent for agent in job.agents if agent.host is not made.hosts[lost]]
    ranks = job.await_world(2, after=1)
    assert {rank.host for rank in ranks.values()} == {agent.host.name for agent in left}
    job.await_steps()
    assert job.finish(*left) == [0, 0], job
    reason = f"node node{lost} was lost: no heartbeat for 4 s; continuing with 2 of 3 nodes"
    assert job.reason(*left) == f"ddp-launch: {reason} (restart 1 of 1)"
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_node_is_powered_off(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = three_nodes(lab, tmp_path)
    other = next(r for r in job.ranks().values() if r.node_rank == 2)
    assert_goes_on_without(job, int(other.host[-1]), undisturbed)


def test_the_node_of_rank_0_and_the_store_is_powered_off(
    lab: Build, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = three_nodes(lab, tmp_path)
    assert_goes_on_without(job, int(job.ranks()[0].host[-1]), undisturbed)


@NIGHTLY
def test_a_node_of_a_job_that_has_trained_regularly_is_missed_before_its_lease_ends(
    lab: Build, tmp_path: Path
) -> None:
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    job = Job(
        made,
        tmp_path,
        service.endpoint,
        "--nnodes",
        "1:2",
        "--last-call",
        "20",
        "--max-restarts",
        "1",
        lease="",
    )
    job.start(*made.hosts[:2])
    job.await_world(2)
    time.sleep(JobSpec("job").lease_s + 2.0)  # its ranks train for longer than a lease
    made.power_off(made.hosts[1])
    job.await_world(1, after=1)
    assert job.finish(job.agents[0]) == [0], job
    lost = re.search(
        "was lost: no heartbeat, and no progress of the ranks, for ([0-9]+) s", job.reason(job.agents[0])
    )
    assert lost is not None, job
    assert 4 <= int(lost[1]) <= 8
    job.assert_nothing_left()


@NIGHTLY
def test_a_node_comes_back_with_a_new_address(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The one that has rank 0 and the store: the others find both at the new address."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    job = Job(made, tmp_path, service.endpoint, "--nnodes", "2", "--max-restarts", "1")
    job.start(*made.hosts[:2])
    first = job.await_world(2)[0]
    lost = next(host for host in made.hosts if host.name == first.host)
    (stayed,) = (agent for agent in job.agents if agent.host is not lost)
    made.power_off(lost)
    made.power_on(lost, number=99)
    (back,) = job.start(lost)
    ranks = job.await_world(2, after=1)
    assert ranks[0].host == lost.name
    assert ranks[0].store in ("10.77.0.99", "fd77::63")
    job.await_steps()
    assert job.finish(stayed, back) == [0, 0], job
    line = job.reason(stayed)
    assert line.startswith(f"ddp-launch: node {lost.name} ")
    assert line.endswith("(restart 1 of 1)")
    job.assert_curve(undisturbed)
    job.assert_nothing_left()
