"""One fault after another, drawn from a seed; after each of them the job trains again, on all of its nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from lab_faults import Kind, Saboteur, plan
from lab_job import Job, Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_job import Undisturbed
    from lab_network import Lab

    Build = Callable[..., Lab]

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
