"""Journals of simulated jobs: a replay makes the same decisions, whatever happens to the job."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from sim_world import Job

from ddp_launch_wings.replay.what_if import Changes, compare

if TYPE_CHECKING:
    from journals import MemoryJournal

_SEEDS = min(int(os.environ.get("SEEDS", "24")), 2000)
_PARTS = 4
_FASTER = 100  # than the job; the limit is for the sum of many short jobs


class RecordedJob(Job):
    keeps_journals = True


def journals(seed: int) -> list[MemoryJournal]:
    job = RecordedJob(seed)
    job.run()
    found = [each.journal for each in (*job.services, *job.agents)]
    return [journal for journal in found if journal is not None]


@pytest.mark.parametrize("part", range(_PARTS))
def test_a_replay_decides_the_same_in_a_fraction_of_the_time(part: int) -> None:
    took_s = span_s = 0.0
    for seed in range(part, _SEEDS, _PARTS):
        for journal in journals(seed):
            began = time.process_time()
            steps = journal.steps()
            took_s += time.process_time() - began
            span_s += steps[-1].now - steps[0].now if steps else 0.0
            assert len(steps) == journal.recorded
            different = [number for number, step in enumerate(steps) if not step.same]
            assert not different, f"seed {seed}: {journal.machine.name}: {steps[different[0]]}"
            if journal.machine.name == "service":
                _equal, parting = compare(journal.records(), Changes())
                assert parting is None, f"seed {seed}: {parting}"
    assert span_s > _FASTER * took_s
