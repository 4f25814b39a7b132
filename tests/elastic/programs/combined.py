"""Trains with things whose state differs between ranks, as PLAN says, and is disturbed once.

The last generation trains again, without a State and undisturbed. Each rank tells whether both have the same bits.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import averaging, elastic

PLAN = json.loads(os.environ["PLAN"])
RANK = int(os.environ["RANK"])
STEPS = 9


def tell(what, **facts):
    said = {"what": what, "generation": int(os.environ["DDP_GENERATION"]), "rank": RANK} | facts
    with open(f"{os.environ['THERE']}/told-{RANK}", "a") as file:
        file.write(json.dumps(said) + "\n")


def move_to_own_node():
    """Each rank on a node of its own; that of the rank that dies is lost."""
    since = 2 if RANK == 1 and os.environ["DDP_GENERATION"] != "1" else 1
    os.environ["DDP_SCRATCH"] = f"{os.environ['THERE']}/node-{RANK}-since-{since}"
    Path(os.environ["DDP_SCRATCH"]).mkdir(mode=0o700, exist_ok=True)


class Source:
    """Batches of this rank; it remembers how many it has given."""

    def __init__(self):
        self.given = 100 * RANK

    def __iter__(self):
        while True:
            self.given += 1
            yield torch.randn(4, 12, generator=torch.Generator().manual_seed(self.given))

    def state_dict(self):
        return {"given": self.given, "seen": torch.full((2,), self.given)}

    def load_state_dict(self, state):
        assert state["seen"].tolist() == [state["given"]] * 2
        self.given = state["given"]


def stateful_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = [torch.randn(12, generator=torch.Generator().manual_seed(100 * RANK + i)) for i in range(60)]
    order = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(RANK))
    return StatefulDataLoader(data, batch_size=4, sampler=order, generator=torch.Generator())


def averager(model):
    if PLAN["kind"] == "local":
        return averaging.LocalSGD(model, every=3, warmup=1)
    return averaging.DiLoCo(
        model, lambda anchors: torch.optim.SGD(anchors, 0.7, momentum=0.9, nesterov=True), 3, 1
    )


def everything():
    """The objects of a State, by name."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 12))
    torch.manual_seed(10 + RANK)
    wrapped = ddp.DistributedDataParallel(model)
    found = {"model": wrapped, "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)}
    if PLAN["kind"] != "plain":
        found["averager"] = averager(wrapped)
    found["optimizer"] = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    source = stateful_loader() if PLAN.get("torchdata") else Source()
    return found | {"source": source if PLAN.get("torchdata") else elastic.PerRank(source)}


def train_step(things, batch):
    averaged = things.get("averager")
    with torch.enable_grad() if averaged is None else averaged.step():
        things["optimizer"].zero_grad()
        loss = things["model"](batch).square().mean()
        scaler = things["scaler"]
        scaler.scale(loss).backward()
        scaler.step(things["optimizer"])
        scaler.update()


def all_of(things):
    """What is to have the same bits, on this rank."""
    model = things["model"].module
    found = [*model.parameters(), *(each for s in things["optimizer"].state.values() for each in s.values())]
    if PLAN["kind"] == "diloco":
        found += [*things["averager"].state_dict()["anchors"].values()]
        found += [s["momentum_buffer"] for s in things["averager"].outer.state.values()]
    return [*found, torch.tensor(things["scaler"].get_scale()), torch.rand(3)]


def disturbed():
    things = everything()
    state = elastic.State(**things, step=0, **PLAN.get("state", {}))

    def steps():
        for batch in getattr(things["source"], "value", things["source"]):
            train_step(things, batch)
            if os.environ["DDP_GENERATION"] == "1" and RANK == 1 and state.step + 1 == PLAN.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()
            while state.step == PLAN.get("protected") and (state.protected_commit or 0) < state.step:
                time.sleep(0.01)
            if state.step >= STEPS:
                return

    resumed = state.resume()
    if resumed:
        tell("resumed", number=resumed.number, step=state.step)
    steps()
    return things, state


def main():
    if PLAN.get("own_nodes"):
        move_to_own_node()
    ddp.init(timeout=60)
    things, state = disturbed()
    found = all_of(things)
    state.close()
    alone = everything()
    batches = iter(getattr(alone["source"], "value", alone["source"]))
    for _step in range(STEPS):
        train_step(alone, next(batches))
    same = [torch.equal(a, b) for a, b in zip(found, all_of(alone), strict=True)]
    tell("end", same=all(same), of=len(same))
    dist.barrier()
    ddp.shutdown()


main()
