"""Jobs under fire, one seed each. `make sim SEEDS=20000` for more, SEED=17 (and -s) for the story of one."""

from __future__ import annotations

import os
import sys
import traceback

import pytest
from sim_transcript import Transcript
from sim_world import Job, simulate

_SEEDS = int(os.environ.get("SEEDS", "200"))
_PARTS = 8
_ONE = os.environ.get("SEED")


@pytest.mark.skipif(_ONE is not None, reason="one seed was asked for")
@pytest.mark.parametrize("part", range(_PARTS))
def test_invariants_hold_and_every_job_ends(part: int) -> None:
    for seed in range(part, _SEEDS, _PARTS):
        try:
            simulate(seed)
        except Exception as error:
            traceback.print_exc()
            pytest.fail(f"seed {seed}: {error} (its story: SEED={seed} pytest -s)")


@pytest.mark.skipif(_ONE is None, reason="no SEED given")
def test_one_seed() -> None:
    """Prints what happens in it; see tests/scenarios/README.md for how to keep it."""
    job = Job(int(_ONE or 0))
    job.monitor.transcript = Transcript()
    try:
        job.run()
    finally:
        sys.stderr.write("\n".join(job.monitor.transcript.take()) + "\n")


@pytest.mark.skipif(_ONE is not None, reason="one seed was asked for")
def test_some_jobs_heal() -> None:
    """Otherwise the invariants about ranks that keep their processes would hold for nothing."""
    jobs = [simulate(seed) for seed in range(40)]
    assert sum(job.training.kept for job in jobs) > 1
    assert sum(job.service.job.state.heals_used for job in jobs) > 1
