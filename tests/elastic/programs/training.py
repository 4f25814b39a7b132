"""A small training that is disturbed as the test says, and tells what it did: one line of JSON after the other.

What is to happen comes as JSON in PLAN, by generation: `kill` a rank at a step, before or after or in its commit.
After that of the step `flush` each rank waits for the disk: in the next step's collectives all know that it is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import elastic
from ddp.elastic import generators, image

PLAN = json.loads(os.environ["PLAN"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = os.environ["DDP_GENERATION"]
SIZE, BATCH = 58, 3


def tell(what, **facts):
    said = {"what": what, "generation": int(GENERATION), "rank": RANK} | facts
    with open(f"{os.environ['THERE']}/told-{RANK}", "a") as file:
        file.write(json.dumps(said) + "\n")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(13), nn.Linear(13, 1))


def wrapped(kind):
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = network()
        fully_shard(model[0])
        return fully_shard(model)
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(network())
    return ddp.DistributedDataParallel(network())


def digest(model, optimizer):
    """Of all parameters and what the optimizer keeps of them, whole, whoever has which part."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def drawn():
    """What the generators give next; they are left as they were."""
    states = generators.get()
    numbers = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    generators.set(states)
    return numbers


def disturb(step, when):
    kill = PLAN.get("kill", {}).get(GENERATION)
    if kill and (kill["rank"], kill["step"], kill["when"]) == (RANK, step, when):
        if when == "in":
            image.finish = lambda *_: die()
        else:
            die()


def options():
    """Of State; a folder may be one of each rank."""
    given = dict(PLAN["state"])
    return given | ({"folder": given["folder"].replace("RANK", str(RANK))} if "folder" in given else {})


def move_to_own_node():
    """Each rank on a node of its own; a replaced one comes with nothing in its memory."""
    replaced = [generation for generation, ranks in PLAN.get("replaced", {}).items() if RANK in ranks]
    since = max((int(each) for each in replaced if int(each) <= int(GENERATION)), default=1)
    os.environ["DDP_SCRATCH"] = f"{os.environ['THERE']}/node-{RANK}-since-{since}"
    Path(os.environ["DDP_SCRATCH"]).mkdir(mode=0o700, exist_ok=True)


def main():
    if PLAN.get("own_nodes"):
        move_to_own_node()
    ddp.init(PLAN.get("backend", "auto"), timeout=60)
    model = wrapped(PLAN["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)
    random.seed(RANK)
    np.random.seed(RANK)
    data = torch.randn(SIZE, 7, generator=torch.Generator().manual_seed(3))
    sampler = elastic.ElasticSampler(SIZE, seed=4)
    state = elastic.State(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, losses=[], **options()
    )
    resumed = state.resume()
    if resumed:
        same = digest(model, optimizer)
        tell(
            "resumed",
            number=resumed.number,
            in_memory=resumed.in_memory,
            losses=state.losses,
            digest=same,
            drawn=drawn(),
        )
    loader = torch.utils.data.DataLoader(
        list(enumerate(data)), batch_size=BATCH, sampler=sampler, generator=torch.Generator()
    )
    for _epoch in sampler.epochs(PLAN["epochs"]):
        for ids, batch in loader:
            noise = random.gauss(1, 0.1) + float(np.random.rand())  # what else than dropout a rank may draw
            loss = model(batch).square().mean() * noise
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            state.losses = [*state.losses, mean.item() / WORLD]
            step = len(state.losses)
            same = digest(model, optimizer)
            tell("step", step=step, ids=ids.tolist(), digest=same, drawn=drawn(), losses=state.losses)
            if PLAN.get("stop") == step:
                state.commit(samples=len(ids))
                state.flush()
                dist.barrier()
                raise SystemExit(0)
            disturb(step, "before")
            disturb(step, "in")
            state.commit(samples=len(ids))
            if PLAN.get("flush") == step:
                state.flush()
            disturb(step, "after")
    tell("end", losses=state.losses)
    state.close()
    ddp.shutdown()


main()
