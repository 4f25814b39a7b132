"""The long ones: the same promises as in the suite, held for longer and hit at random moments. `make nightly`."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY

if TYPE_CHECKING:
    from launched import Launch

pytestmark = [
    pytest.mark.nightly(instead=("shell/test_restarts.py", "shell/test_containment.py")),
    pytest.mark.timeout(1200),
]

SEED = int(os.environ.get("SEED", "1"))

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
generation, rank = int(os.environ["DDP_GENERATION"]), dist.get_rank()
for step in range(generation % 7 + 1):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
if generation <= int(sys.argv[1]) and rank == generation % dist.get_world_size():
    if generation % 2:
        os.kill(os.getpid(), 9)
    raise ValueError(f"generation {generation}")
dist.destroy_process_group()
"""


def test_five_hundred_restarts_of_a_training_group(launch: Launch) -> None:
    options = ("--max-restarts", "1000", "--crash-loop", "off", "--nproc-per-node", "3")
    job = launch(*options, "SCRIPT", "500", source=ALL_REDUCE)
    assert job.wait(1000) == 0, job.stderr()[-3000:]
    assert "restart 500 of 1000" in job.stderr()
    job.assert_nothing_left()


@pytest.mark.parametrize("victim", ["agent", "zygote"])
def test_killed_at_random_moments(launch: Launch, victim: str) -> None:
    moments = random.Random(SEED)
    for _ in range(25):
        source = FAMILY + "there('rank')\nfamily()\nstay('up')\n"
        job = launch("--nproc-per-node", "2", "--shutdown-timeout", "1", source=source)
        if moments.random() < 0.5:
            job.await_there("up-0", "up-1")
        else:
            signal.sigtimedwait([], moments.uniform(0.0, 1.5))  # any moment of the start
        pid = job.agent.pid if victim == "agent" else job.zygote()
        if pid:
            os.kill(pid, signal.SIGKILL)
        if victim == "zygote":
            job.agent.send_signal(signal.SIGTERM)
        job.wait()
        job.assert_nothing_left(5.0)
