"""What happens when a rank fails. Real nodes with real agents; the first of them serves the rendezvous."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from lab_host import eventually
from lab_job import PORT, Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

NIGHTLY = pytest.mark.nightly(
    instead=(
        "lab/test_node_scenarios.py::test_the_node_of_rank_0_and_the_store_is_powered_off",
        "shell/test_restarts.py",
    )
)

ONE_RESTART = ("--max-restarts", "1")


def two_nodes(lab: Build, folder: Path, *words: str) -> Job:
    made = lab(2)
    job = Job(made, folder, f"node0:{PORT}", "--nnodes", "2", "--nproc-per-node", "2", *words)
    job.start(*made.hosts)
    job.await_world(4)
    return job


def assert_healed(job: Job, words: str, undisturbed: Undisturbed) -> None:
    """One restart, for a reason that both nodes told alike; then the job ends well."""
    job.await_world(4, after=1)
    job.await_steps()
    assert job.finish() == [0, 0], job
    assert words in job.reason()
    assert "(restart 1 of 1)" in job.reason()
    assert {point.generation for point in job.curve()} == {1, 2}
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_nothing_happens(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = two_nodes(lab, tmp_path)
    job.await_steps(20)
    assert job.finish() == [0, 0], job
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_rank_raises(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = two_nodes(lab, tmp_path, *ONE_RESTART)
    job.order(3, "raise the batch is bad")
    assert_healed(job, "rank 3 on node1: ValueError: the batch is bad; restarting", undisturbed)


@NIGHTLY
def test_a_rank_raises_and_no_restart_is_left(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = two_nodes(lab, tmp_path)
    job.await_steps()
    job.order(2, "raise the batch is bad")
    assert job.exit_codes() == [1, 1], job
    causes = {agent.first_cause() for agent in job.agents}
    assert causes == {"rank 2 on node1 failed first: ValueError: the batch is bad"}, job
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


@NIGHTLY
def test_a_rank_is_killed(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = two_nodes(lab, tmp_path, *ONE_RESTART)
    job.kill(job.ranks()[1])
    assert_healed(job, "rank 1 on node0: killed by SIGKILL", undisturbed)


@NIGHTLY
def test_a_rank_is_stuck_in_native_code(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """It holds the interpreter's lock and ignores SIGTERM while another rank fails."""
    job = two_nodes(lab, tmp_path, *ONE_RESTART, "--shutdown-timeout", "2")
    stuck = job.ranks()[2]
    job.order(2, "stuck")
    eventually((job.folder / "stuck").exists)
    job.kill(job.ranks()[0])
    assert_healed(job, "rank 0 on node0: killed by SIGKILL", undisturbed)
    assert not job.runs(stuck)


@NIGHTLY
def test_an_agent_is_killed(lab: Build, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Its ranks die with it; it is started anew, as a supervisor of services would do."""
    job = two_nodes(lab, tmp_path, *ONE_RESTART)
    first, second = job.agents
    second.process.send(signal.SIGKILL)
    assert second.process.wait() == -signal.SIGKILL
    eventually(lambda: not second.host.processes(), what="its ranks died with it")
    (third,) = job.start(second.host)
    job.await_world(4, after=1)
    job.await_steps()
    assert job.finish(first, third) == [0, 0], job
    line = job.reason(first)  # a rank of node0 may have told first that it lost the connection to its peers
    assert line.startswith("ddp-launch: node node1 ")
    assert line.endswith("(restart 1 of 1)")
    job.assert_curve(undisturbed)
    job.assert_nothing_left()
