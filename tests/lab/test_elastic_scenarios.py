"""What happens when the number of nodes changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lab_job import Job, Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

NIGHTLY = pytest.mark.nightly(
    instead=(
        "shell/test_node_trouble.py::test_a_world_grows_by_who_comes_and_shrinks_by_who_goes",
        "shell/test_node_trouble.py::test_a_spare_says_so_and_takes_the_place_of_a_lost_node",
    )
)


@NIGHTLY
def test_the_job_grows_from_two_nodes_to_four_and_shrinks_to_three(
    lab: Build, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    made = lab(4, "service")
    service = Service(made.hosts[4], tmp_path)
    words = ("--nnodes", "2:4", "--last-call", "1", "--scale-up", "immediate", "--max-restarts", "1")
    job = Job(made, tmp_path, service.endpoint, *words)
    job.start(*made.hosts[:2])
    job.await_world(2)
    job.await_steps()
    job.start(*made.hosts[2:4])
    ranks = job.await_world(4)
    assert {rank.host for rank in ranks.values()} == {"node0", "node1", "node2", "node3"}
    job.await_steps()
    made.power_off(made.hosts[3])
    left = job.agents[:3]
    job.await_world(3, after=job.generation)
    job.await_steps()
    assert job.finish(*left) == [0, 0, 0], job
    reason = "node node3 was lost: no heartbeat for 4 s; continuing with 3 of 4 nodes"
    lines = {agent.said()[-1] for agent in left}  # to grow costs nothing of the budget
    assert lines == {f"ddp-launch: {reason} (restart 1 of 1)"}
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_spare_takes_over(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    made = lab(3, "service")
    service = Service(made.hosts[3], tmp_path)
    words = ("--nnodes", "2", "--spares", "1", "--max-restarts", "1")
    job = Job(made, tmp_path, service.endpoint, *words)
    job.start(*made.hosts[:2])
    job.await_world(2)
    job.start(made.hosts[2])
    service.await_said("node2")
    made.power_off(made.hosts[1])
    ranks = job.await_world(2, after=1)
    assert {rank.host for rank in ranks.values()} == {"node0", "node2"}
    job.await_steps()
    left = [agent for agent in job.agents if agent.host.is_on]
    assert job.finish(*left) == [0, 0], job
    reason = "node node1 was lost: no heartbeat for 4 s; restarting with 1 spare node"
    assert job.reason(left[0]) == f"ddp-launch: {reason} (restart 1 of 1)"
    job.assert_curve(undisturbed)
    job.assert_nothing_left()
