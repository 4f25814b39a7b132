"""A rank that stands still: it is named, and its stacks are taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launched import Launch

TRAIN = """
import os, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

rank = int(os.environ["RANK"])

class Samples(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, at):
        if rank == 1 and at == 60:
            time.sleep(600)
        return torch.ones(4)

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
for batch in DataLoader(Samples()):
    model(batch).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    model.zero_grad()
dist.barrier()
"""


def test_the_report_holds_the_stack_of_the_rank(launch: Launch) -> None:
    """The last restart is used up: box, JSON and the exit code."""
    words = ("--nproc-per-node", "2", "--hang-timeout", "2")
    job = launch(*words, source=TRAIN)
    assert job.wait() == 124, job.stderr()
    cause = job.failure()["first_cause"]
    assert (cause["rank"], cause["class"]) == (1, "hang")
    assert "in its data loader" in cause["reason"]
    assert re.search(r'File ".*train\.py", line \d+ in __getitem__', cause["traceback"])
    assert "rank 0 has made no progress" in cause["traceback"]
    assert "thread" in cause["traceback"]
    assert "in __getitem__" in Path(cause["log"]).read_text()
    assert "rank 1" in job.stderr()
    assert 'File "' in job.stderr(), "the end of the stacks; how much of them the box has room for may differ"
