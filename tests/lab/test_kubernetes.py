"""Pods of an Indexed Job as the agent sees them: names, an index, and addresses that come and go."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from lab_job import LONG_S, Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_host import Host
    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]


class Pods(Job):
    """Hosts named NAME-INDEX; nothing is said of a rendezvous."""

    def _environment(self, host: Host) -> dict[str, str]:
        return super()._environment(host) | {"JOB_COMPLETION_INDEX": host.name.rpartition("-")[2]}


def two_pods(lab: Build, folder: Path, *words: str) -> tuple[Lab, Pods]:
    made = lab(0, "train-0", "train-1")
    job = Pods(made, folder, "", "--nnodes", "2", "--max-restarts", "2", *words)
    job.start(*made.hosts)
    job.await_world(2)
    return made, job


@pytest.mark.nightly(
    instead=(
        "deploy/test_manifests.py",
        "lab/test_lab_scenarios.py::test_the_node_of_rank_0_and_the_store_is_powered_off",
    )
)
def test_a_pod_that_is_evicted_leaves_in_good_order_and_its_successor_takes_over(
    lab: Build, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """SIGTERM, with the grace of a pod to end; no lease has to run out before the others know."""
    made, job = two_pods(lab, tmp_path)
    job.await_steps()
    evicted = job.agents[1]
    evicted.process.send(signal.SIGTERM)
    assert evicted.process.wait(LONG_S) == 143, job
    (back,) = job.start(made.hosts[1])
    job.await_world(2, after=1)
    assert job.finish(job.agents[0], back) == [0, 0], job
    assert "train-1" in " ".join(job.agents[0].said())
    job.assert_curve(undisturbed)
    job.assert_nothing_left()
