"""A training in which ranks do wrong as PLAN says, each thing once, and which tells the bits of its end.

`faults`: the step, the place in it, the rank and the kind: a function of bench/faults/programs/faults.py, or `node`,
where the test removes the node of the rank. What has been done is noted in a folder that outlives the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import elastic
from ddp.elastic import generators
from ddp.elastic.images import image

PLAN = json.loads(os.environ["PLAN"])
NOTES = Path(os.environ["NOTES"])
sys.path.insert(0, PLAN["programs"])
import faults  # noqa: E402

RANK = int(os.environ["RANK"])
SIZE, BATCH = 64, 4
torch.set_num_threads(1)


def do_wrong(step, place):
    for number, (when, where, rank, kind) in enumerate(PLAN["faults"]):
        if (when, where, rank) != (step, place, RANK):
            continue
        try:
            os.close(os.open(NOTES / f"fault-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if kind == "node":
            (NOTES / f"node-{number}").touch()
            time.sleep(1000)
        getattr(faults, kind)(SimpleNamespace(folder=NOTES, device=torch.device("cpu")))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.ReLU())
        self.second = nn.Linear(24, 1)
        self.step = 0

    def forward(self, x):
        do_wrong(self.step, "forward")
        hidden = self.first(x)
        hidden.register_hook(lambda _gradient: do_wrong(self.step, "backward"))
        return self.second(hidden)


def bits(*states):
    found = hashlib.sha256()
    for state in states:
        for tensor in sorted_tensors(state):
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def sorted_tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = [tree[name] for name in sorted(tree, key=str)]
    if isinstance(tree, list | tuple):
        return [tensor for each in tree for tensor in sorted_tensors(each)]
    return [torch.tensor(float(tree))] if isinstance(tree, int | float) else []


if PLAN["hosts"] > 1:  # as if they were on different machines
    os.environ["DDP_HOST_KEY"] = f"host{RANK}"
place = ddp.init(PLAN["backend"], timeout=60)
torch.manual_seed(1)
net = Net()
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
data = torch.randn(SIZE, 7, generator=torch.Generator().manual_seed(3))
sampler = elastic.ElasticSampler(SIZE, seed=4)
torch.manual_seed(RANK)
random.seed(RANK)
np.random.seed(RANK)
kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
state = elastic.State(**kept, step=0, chain="", losses=0.0)


def one_step(x):
    net.step = state.step + 1
    optimizer.zero_grad()
    loss = model(x).square().mean() * (1 + random.random()) + float(np.random.rand())
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    do_wrong(net.step, "before the optimizer")
    optimizer.step()
    scheduler.step()
    state.step += 1
    state.losses += mean.item()
    weights = bits(
        list(model.parameters()), optimizer.state_dict()
    )  # statistics of a batch differ between ranks
    state.chain = hashlib.sha256(f"{state.chain} {weights} {state.losses!r}".encode()).hexdigest()
    do_wrong(state.step, "before the commit")
    state.commit(samples=len(x))
    do_wrong(state.step, "after the commit")


def train():
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    for _epoch in sampler.epochs(10_000):
        for x in loader:
            one_step(x)
            if state.step == PLAN["steps"]:
                return


finish = image.finish


def finish_unless_it_is_time(*words):
    do_wrong(state.step, "in the commit")
    finish(*words)


image.finish = finish_unless_it_is_time
if PLAN["recover"] == "restart":
    state.resume()
    train()
else:
    state.run(train)
found = {
    "chain": state.chain,
    "bits": bits(model.module.state_dict(), optimizer.state_dict()),
    "generators": bits(generators.get()),
    "losses": state.losses,
}
(NOTES / f"end-{dist.get_rank()}").write_text(json.dumps(found))
state.close()
ddp.shutdown()
