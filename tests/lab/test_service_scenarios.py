"""What happens when the rendezvous service is lost. It keeps what it decided in a file, and is started again on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from lab_job import PORT, Job, Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

NIGHTLY = pytest.mark.nightly(
    instead="shell/test_replicas.py::test_ranks_do_not_notice_that_the_service_died_and_came_back"
)

HEALED = (
    "ddp-launch: rank 1 on {}: ValueError: the batch is bad; restarting with the same nodes (restart 1 of 1)"
)


@NIGHTLY
@pytest.mark.parametrize("for_s", [5.0, 30.0])
def test_the_service_is_down(lab: Build, tmp_path: Path, undisturbed: Undisturbed, for_s: float) -> None:
    """Training goes on meanwhile; what fails after the service is back is healed as ever."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    job = Job(made, tmp_path, service.endpoint, "--nnodes", "2", "--max-restarts", "1")
    job.start(*made.hosts[:2])
    job.await_world(2)
    service.kill()
    before = job.step()
    time.sleep(for_s)
    assert job.step() > before
    service.start()
    job.await_steps(20)
    assert job.generation == 1
    job.order(1, "raise the batch is bad")
    job.await_world(2, after=1)
    job.await_steps()
    assert job.finish() == [0, 0], job
    assert job.reason() == HEALED.format(job.host_of(1))
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_rank_fails_while_the_service_is_down(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nothing is decided without the service; once it is back, the agents tell it what it missed."""
    made = lab(2, "service")
    service = Service(made.hosts[2], tmp_path)
    job = Job(made, tmp_path, service.endpoint, "--nnodes", "2", "--max-restarts", "1")
    job.start(*made.hosts[:2])
    job.await_world(2)
    service.kill()
    job.await_steps()
    job.order(1, "raise the batch is bad")
    job.await_failure()
    assert job.generation == 1
    service.start()
    job.await_world(2, after=1)
    job.await_steps()
    assert job.finish() == [0, 0], job
    assert job.reason() == HEALED.format(job.host_of(1))
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_the_service_and_a_node_are_lost_together(
    lab: Build, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    made = lab(3, "service")
    service = Service(made.hosts[3], tmp_path)
    words = ("--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1")
    job = Job(made, tmp_path, service.endpoint, *words)
    job.start(*made.hosts[:3])
    job.await_world(3)
    made.power_off(service.host)
    made.power_off(made.hosts[1])
    made.power_on(service.host)
    service.start()
    left = [agent for agent in job.agents if agent.host.is_on]
    job.await_world(2, after=1)
    job.await_steps()
    assert job.finish(*left) == [0, 0], job
    assert job.reason(*left).startswith(
        "ddp-launch: node node1 was lost: no heartbeat for 4 s; continuing with 2 of 3"
    )
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_the_node_that_serves_the_rendezvous_comes_back(
    lab: Build, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Its agent kept the job's state in memory: the other one knows that there was a job, and starts it afresh."""
    made = lab(2)
    job = Job(made, tmp_path, f"node0:{PORT}", "--nnodes", "2", "--max-restarts", "1")
    _, other = job.start(*made.hosts)
    job.await_world(2)
    job.await_steps()
    made.power_off(made.hosts[0])
    made.power_on(made.hosts[0])
    (back,) = job.start(made.hosts[0])
    job.await_world(2, after=1)
    job.await_steps()
    assert job.finish(other, back) == [0, 0], job
    lost = (
        "the rendezvous service had lost the state of the job (generation 1; "
        "`ddp-rendezvous --store` keeps it); restarting the ranks"
    )
    assert job.story(other, back) == [f"ddp-launch: {lost}"]
    job.assert_curve(undisturbed)
    job.assert_nothing_left()
