"""Heals in real jobs: who keeps its process, what it keeps with it, and what is left of those that do not."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from healing import TRAINS, end, world

if TYPE_CHECKING:
    from launched import Launch

TWO = ("--nproc-per-node", "2")


def test_the_others_keep_their_processes_when_rank_0_is_killed(launch: Launch) -> None:
    job = launch(*TWO, source=TRAINS, fake_torch="")
    first = world(job.there, 1, 2)
    os.kill(first.ranks[0].pid, signal.SIGKILL)
    second = world(job.there, 2, 2)
    assert second.ranks[1].pid == first.ranks[1].pid
    assert second.ranks[0].pid != first.ranks[0].pid
    assert [second.ranks[rank].joins for rank in (0, 1)] == [True, False]
    assert second.ranks[0].port == second.ranks[1].port != first.ranks[0].port
    end(job)
