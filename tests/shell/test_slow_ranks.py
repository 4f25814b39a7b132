"""Real training with one slow rank: its data loader, or what it computes. It is named, and nobody else is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import eventually

if TYPE_CHECKING:
    from launched import Launch

REPOSITORY = str(Path(__file__).parents[2])
TRAIN = """
import os, sys, time
if sys.argv[1] != "torch":
    sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
finish, slow = os.path.join(os.environ["THERE"], "finish"), sys.argv[2]
if sys.argv[1] == "torch":
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
else:
    import ddp
    from ddp import DistributedDataParallel as DDP
    ddp.init()
late = dist.get_rank() == 1

class Layer(torch.nn.Linear):
    def forward(self, x):
        if late and slow == "forward":
            time.sleep(0.05)
        return super().forward(x)

class Samples(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            if late and slow == "data":
                time.sleep(0.05)
            yield torch.randn(8)

model = DDP(torch.nn.Sequential(Layer(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
over = torch.zeros(1)
for batch in torch.utils.data.DataLoader(Samples(), batch_size=None):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    over.fill_(os.path.exists(finish))
    dist.all_reduce(over)
    if over.item():
        break
dist.destroy_process_group()
"""


@pytest.mark.nightly(instead=("core/test_stragglers.py", "shell/test_node_health.py"))
@pytest.mark.parametrize(
    ("with_whose", "slow", "where"),
    [
        (REPOSITORY, "data", "data loader"),
        (REPOSITORY, "forward", "forward"),
        # torch's reducer waits in C++, at the end of the backward.
        ("torch", "data", "data loader"),
        ("torch", "forward", "forward"),
    ],
    ids=["data-ours", "forward-ours", "data-torchs", "forward-torchs"],
)
def test_the_slow_one_of_three_is_named_with_what_it_is_slow_in(
    launch: Launch, with_whose: str, slow: str, where: str
) -> None:
    words = ("--nproc-per-node", "3", "--preload", "torch._dynamo", "--stragglers", "report,window=1s")
    job = launch(*words, "SCRIPT", with_whose, slow, source=TRAIN)
    named = eventually(lambda: re.search(r"rank \d on \S+ is slower.*", job.stderr()), 100.0)
    (job.there / "finish").touch()
    assert job.wait() == 0, job.stderr()
    assert where in named[0].partition(",")[0]
    assert re.findall(r"rank (\d) on \S+ is slower", job.stderr()) == ["1"]
