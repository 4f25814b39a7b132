"""A training of four logical ranks in a world of any size, which tells the bits of every step.

PLAN: the `backend`, the `cases` by name, and for the case with a State the `folder` and the step to `stop` after. The
model has what depends on who computes: dropout, batch statistics, and random numbers of Python and NumPy, in the loader
and in the loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import elastic

PLAN = json.loads(os.environ["PLAN"])
RANK = int(os.environ["RANK"])
LOGICAL, SIZE, BATCH, STEPS = PLAN.get("logical", 4), 90, 3, PLAN.get("steps", 3)
CASES = {
    "plain": {},
    "views and small buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "parameters that some do not use": {"find_unused_parameters": True},
    "accumulated": {},
    "float64 in channels last": {},
    "several passes": {},
}
DATA = torch.randn(SIZE, 7, generator=torch.Generator().manual_seed(3))


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, DATA[index] + 0.1 * torch.randn(7) * random.random() + 0.1 * float(np.random.rand())


class Net(nn.Module):
    def __init__(self, sparing):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU())
        self.second = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 1))
        self.third = nn.Linear(32, 1)
        self.sparing = sparing
        self.register_buffer("mask", torch.ones(32, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen * 0.5 + x.detach().sum()  # a buffer that is replaced, not written to
        hidden = self.first(x) * self.mask
        if self.sparing:
            return self.third(hidden) if x.sum() > 0 else self.second(hidden)
        return self.second(hidden) + self.third(hidden)


class Images(nn.Module):
    """Gradients whose memory is not in the order of their elements."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, x):
        images = x.double()[:, :6].reshape(-1, 3, 2, 1).expand(-1, -1, -1, 5).repeat(1, 1, 2, 1)
        return self.head(self.body(images.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


def digest(model, optimizer):
    found = hashlib.sha256()
    for _name, tensor in sorted(model.module.state_dict().items()):
        found.update(tensor.contiguous().numpy().tobytes())
    for parameter in model.parameters():
        for _name, value in sorted(optimizer.state[parameter].items()):
            found.update(value.contiguous().numpy().tobytes())
    for states in (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()):
        found.update(repr(states).encode())
    return found.hexdigest()


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def losses_of(case, model, x):
    if case != "several passes":
        yield model(x).square().mean() * (1 + random.random())
        return
    with model.no_sync():  # micro-batches of one logical rank
        yield model(x[:1].repeat(2, 1)).square().mean() + model(x).mean()
    yield model(x).square().mean()


def train(case):
    seed(1)
    net = Images() if "channels" in case else Net(sparing="not use" in case)
    model = ddp.DistributedDataParallel(net, **CASES[case])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seed(RANK)  # those of rank 0 count
    world = elastic.LogicalWorld(LOGICAL)
    sampler = elastic.ElasticSampler(SIZE, seed=4, logical_world=world)
    loader = torch.utils.data.DataLoader(Augmented(), batch_sampler=sampler.batches(BATCH))
    folder = PLAN.get("folder") if case == "plain" else None
    state = elastic.State(
        model=model, optimizer=optimizer, sampler=sampler, world=world, step=0, folder=folder
    )
    state.resume()
    told = []
    for _epoch in sampler.epochs(2):
        for step in world.steps(loader, model):
            if case != "accumulated" or state.step % 2 == 0:
                optimizer.zero_grad()
            losses = []
            for _ids, x in step:
                for loss in losses_of(case, model, x):
                    loss.backward()
                losses.append(loss)
            optimizer.step()
            state.step += 1
            mean = world.mean(losses).item()
            told.append([state.step, digest(model, optimizer), mean])
            state.commit(samples=len(x))
            if folder and state.step == PLAN.get("stop"):
                state.checkpoint()
            if state.step == PLAN.get("stop", STEPS * 2):
                state.close()
                return told
    state.close()
    return told


hosts = int(os.environ["HOSTS"])
if hosts > 1:  # as if they were on different machines
    os.environ["DDP_HOST_KEY"] = f"host{RANK * hosts // int(os.environ['WORLD_SIZE'])}"
ddp.init(PLAN.get("backend", "auto"), timeout=60)
found = {case: train(case) for case in PLAN["cases"]}
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, found)
assert all(each == found for each in everyone), "the processes have different bits"
if RANK == 0:
    Path(os.environ["THERE"], "told").write_text(json.dumps(found))
ddp.shutdown()
