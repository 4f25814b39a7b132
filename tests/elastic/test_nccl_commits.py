"""What NCCL does to a state: its collectives end without an error when they are aborted, and the result is garbage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launched import Launched

PROGRAM = str(Path(__file__).parent / "programs" / "nccl_commits.py")
NCCL_LIKE = str(Path(__file__).parents[1] / "nccl")


@pytest.mark.parametrize(
    "what", ["step", *(pytest.param(w, marks=pytest.mark.nightly) for w in ("optimizer", "checkpoint"))]
)
def test_no_garbage_of_an_aborted_collective_is_ever_resumed(what: str, tmp_path: Path) -> None:
    env = {"THERE": str(tmp_path), "NCCL_LIKE": NCCL_LIKE, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
    options = ("--nproc-per-node", "3", "--max-restarts", "1", "--shutdown-timeout", "2")
    job = Launched(tmp_path / "job", *options, PROGRAM, what, env=env)
    code, said = job.wait(), job.stderr()
    assert code == 0, said
    assert re.search("rank 1 on .* port error", said)
    _first, resumed = (tmp_path / "resumed").read_text().splitlines()
    generation, step, weights = resumed.split()
    # The last commit that is valid on all ranks is that of the step before the fault, or of the one before that: rank 1
    # may have finished an all-reduce whose other ranks have not. Every step adds 3 to each of four weights.
    last = 8 if what == "checkpoint" else 7
    assert generation == "2"
    assert int(step) in (last - 1, last)
    assert float(weights) == 12.0 * int(step)
    assert (tmp_path / "done-0").read_text() == "2 144"
