"""A training whose ranks are killed at random instants. It counts the optimizer steps that are in the state.

The gradient of `counter` is -1 in each step and its learning rate is 1, so its value is the number of optimizer steps
that the parameters have seen. The ranks share a board (tests/elastic/soak.py): each notes there what it has committed.
PLAN: the `backend`, the class of `wrap`, `steps`, or 0 to train until the file `over` exists,
and the `pace`: seconds between two steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import elastic

THERE, PLAN = Path(os.environ["THERE"]), json.loads(os.environ["PLAN"])
sys.path.insert(0, PLAN["beside"])
from soak_board import Board  # noqa: E402

RANK = int(os.environ["RANK"])
BOARD = Board(THERE / "board")
SIZE, BATCH = 60, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
        self.counter = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.layers(x).square().mean() - self.counter.sum()


TRACE = (THERE / f"trace-{RANK}").open("a")  # tells where a run went another way than a calm one
BOARD.begins(RANK, os.getpid())
torch.set_num_threads(1)
ddp.init(PLAN["backend"], timeout=60)
torch.manual_seed(1)
net = Net()
wrap = ddp.DistributedDataParallel if PLAN["wrap"] == "ours" else nn.parallel.DistributedDataParallel
model = wrap(net)
optimizer = torch.optim.AdamW(net.layers.parameters(), lr=0.001)
counts = torch.optim.SGD([net.counter], lr=1.0)
data = torch.randn(SIZE, 7, generator=torch.Generator().manual_seed(3))
sampler = elastic.ElasticSampler(SIZE, seed=4)
torch.manual_seed(RANK)
state = elastic.State(
    model=model, optimizer=optimizer, counts=counts, sampler=sampler, step=0, chain="", stop=False
)


def one_step(x):
    optimizer.zero_grad()
    counts.zero_grad()
    loss = model(x)
    loss.backward()
    # The answer of rank 0 counts. It comes before the optimizers, so all commit the same.
    figures = torch.tensor([loss.item(), float(RANK == 0 and (THERE / "over").exists())], dtype=torch.float64)
    dist.all_reduce(figures)
    optimizer.step()
    counts.step()
    state.step += 1
    state.stop = bool(figures[1]) or state.step == PLAN["steps"]
    weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    state.chain = hashlib.sha256(f"{state.chain} {figures[0]!r}".encode() + weights).hexdigest()
    generation = os.environ.get("DDP_GENERATION", "0")
    TRACE.write(
        f"{state.step} {state.chain[:16]} {generation} {os.getpid()} {x.sum().item()} {loss.item()}\n"
    )
    TRACE.flush()
    state.commit(samples=len(x))
    BOARD.committed(RANK, state.step)


def check():
    """What all ranks had committed is still there, and no optimizer step is in the parameters twice or not at all."""
    least = BOARD.committed_by_all()
    in_parameters = int(net.counter.item())
    if state.step < least or in_parameters != state.step:
        with (THERE / "violations").open("a") as file:
            file.write(f"rank {RANK}: step {state.step}, committed {least}, in parameters {in_parameters}\n")


def train():
    check()
    BOARD.trains(RANK, int(os.environ.get("DDP_GENERATION", "0")))
    loader = torch.utils.data.DataLoader(
        data, batch_sampler=sampler.batches(BATCH), generator=torch.Generator()
    )
    for _epoch in sampler.epochs(1_000_000):
        for x in loader:
            if state.stop:
                return
            one_step(x)
            time.sleep(PLAN.get("pace", 0))


state.run(train)
check()
found = {"step": state.step, "chain": state.chain, "counter": net.counter.item()}
(THERE / f"end-{RANK}").write_text(json.dumps(found))
state.close()
ddp.shutdown()
