"""What happens when nodes, links and the service fail, as far as the kernel and the network decide it, or chance.

What the rules of service and agents decide has a transcript in tests/scenarios. One fault each in a job of one machine
is played by bench/faults.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from lab_faults import Kind, Saboteur, plan
from lab_host import eventually
from lab_job import LONG_S, PORT, Job, Service

from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

NIGHTLY = pytest.mark.nightly(
    instead=("::test_the_node_of_rank_0_and_the_store_is_powered_off", "shell/test_node_trouble.py")
)

HEALED = (
    "ddp-launch: rank 1 on {}: ValueError: the batch is bad; restarting with the same nodes (restart 1 of 1)"
)


# --- links ---------------------------------------------------------------------------------------------------


@NIGHTLY
@pytest.mark.parametrize("for_s", [5.0, 60.0])
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


# --- nodes and the service -----------------------------------------------------------------------------------


def test_the_node_of_rank_0_and_the_store_is_powered_off(
    lab: Build, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Two nodes are enough. The service has a host of its own."""
    made = lab(3, "service")
    service = Service(made.hosts[3], tmp_path)
    words = ("--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1")
    job = Job(made, tmp_path, service.endpoint, *words)
    job.start(*made.hosts[:3])
    lost = int(job.await_world(3)[0].host[-1])
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


# --- one fault after another, drawn from a seed ------------------------------------------------------------------

NODES = 3
WORDS = ("--nnodes", str(NODES), "--max-restarts", "1000", "--crash-loop", "off", "--shutdown-timeout", "5")


@pytest.mark.parametrize(
    ("seed", "n"),
    [
        pytest.param(7, 6, marks=pytest.mark.nightly),
        pytest.param(1, 50, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)]),
        pytest.param(2, 50, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)]),
    ],
)
def test_faults_in_a_row(lab: Build, tmp_path: Path, undisturbed: Undisturbed, seed: int, n: int) -> None:
    made = lab(NODES, "service", seed=seed)
    service = Service(made.hosts[NODES], tmp_path)
    job = Job(made, tmp_path, service.endpoint, *WORDS)
    job.start(*made.hosts[:NODES])
    job.await_world(NODES)
    saboteur = Saboteur(job, service)
    for number, fault in enumerate(plan(seed, n, NODES)):
        began = time.monotonic()
        saboteur.commit(fault)
        try:
            job.await_healthy(NODES)
        except AssertionError as error:
            raise AssertionError(f"fault {number} of seed {seed}: {fault}: {error}") from None
        print(f"{fault}: healthy after {time.monotonic() - began:.1f} s, generation {job.generation}")
    left = saboteur.agents.values()
    assert job.finish(*left) == [0] * NODES, job
    job.assert_curve(undisturbed)
    job.assert_nothing_left()


def test_a_plan_follows_from_its_seed_and_leaves_no_fault_out() -> None:
    assert list(plan(3, 30, NODES)) == list(plan(3, 30, NODES))
    assert list(plan(3, 30, NODES)) != list(plan(4, 30, NODES))
    drawn = list(plan(3, len(Kind), NODES))
    assert {fault.kind for fault in drawn} == set(Kind)
    assert {fault.node for fault in plan(3, 30, NODES)} == set(range(NODES))
