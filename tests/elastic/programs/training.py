"""A small training that is disturbed as the test says, and tells what it did: one line of JSON after the other.

What is to happen comes as JSON in PLAN, by generation: `kill` a rank at a step, before or after or in its commit.
After that of the step `flush` each rank waits for the disk: in the next step's collectives all know that it is there.
After the commits of the steps `protected` each rank waits until other nodes have what it takes to compute it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import elastic
from ddp.elastic import generators
from ddp.elastic.images import image

PLAN = json.loads(os.environ["PLAN"])
RANK = int(os.environ["RANK"])
SIZE, BATCH = 58, 3
DRAWS = PLAN.get("draws", PLAN["model"] != "plain")  # random numbers, which are lost with a node


def generation():
    return os.environ["DDP_GENERATION"]


def tell(what, **facts):
    said = {"what": what, "generation": int(generation()), "rank": RANK, "pid": os.getpid()} | facts
    with open(f"{os.environ['THERE']}/told-{RANK}", "a") as file:
        file.write(json.dumps(said) + "\n")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def network():
    torch.manual_seed(1)
    dropout = nn.Dropout(0.2 if DRAWS else 0.0)
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), dropout, nn.LayerNorm(13), nn.Linear(13, 1))


def without_dropout():
    """Only the generators of survivors are known between two commits: this model does not need any."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), Averaging(13), nn.Linear(13, 1))


class Averaging(nn.Module):
    """Keeps an average in a buffer, as BatchNorm does, and uses it; batches of one sample are fine."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("average", torch.zeros(size))

    def forward(self, inputs):
        self.average.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs - self.average


def sharded_in_two_ways():
    """Tensor parallel within pairs of ranks, FSDP2 between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    fully_shard(model[4], mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def wrapped(kind):
    if kind == "2d":
        return sharded_in_two_ways()
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        world = dist.get_world_size()
        shape, names = ((world,), ("shards",)) if kind == "fsdp2" else ((2, world // 2), ("copies", "shards"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = network()
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "plain":
        return ddp.DistributedDataParallel(without_dropout())
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(network())
    return ddp.DistributedDataParallel(network())


def write_row(number, metrics):
    with open(f"{os.environ['THERE']}/rows", "a") as file:
        file.write(f"{number} {metrics['loss']!r}\n")


def optimizer_of(kind, model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


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
    kill = PLAN.get("kill", {}).get(generation())
    if kill and kill["step"] == step and kill["when"] == when and RANK in kill["ranks"]:
        if when == "in":
            image.finish = lambda *_: die()
        else:
            die()


def options():
    """Of State; a folder may be one of each rank."""
    given = dict(PLAN["state"])
    if PLAN.get("rows"):
        given["on_step"] = write_row
    return given | ({"folder": given["folder"].replace("RANK", str(RANK))} if "folder" in given else {})


def move_to_own_node():
    """Each rank on a node of its own; a replaced one comes with nothing in its memory."""
    replaced = [number for number, ranks in PLAN.get("replaced", {}).items() if RANK in ranks]
    since = max((int(each) for each in replaced if int(each) <= int(generation())), default=1)
    os.environ["DDP_SCRATCH"] = f"{os.environ['THERE']}/node-{RANK}-since-{since}"
    Path(os.environ["DDP_SCRATCH"]).mkdir(mode=0o700, exist_ok=True)


def accumulating(model, last):
    """A part of the step after which gradients are averaged, or not yet."""
    if hasattr(model, "no_sync"):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def train_step(model, optimizer, scheduler, state, ids, batch):
    step = len(state.losses) + 1
    parts = batch.split(1) if PLAN.get("accumulate") else [batch]
    for number, part in enumerate(parts):
        with accumulating(model, last=part is parts[-1]):
            disturb(step, f"forward{number}")
            noise = 1 if not DRAWS else random.gauss(1, 0.1) + float(np.random.rand())
            loss = model(part).square().mean() * noise
            loss.register_hook(lambda _grad: disturb(step, "backward"))
            loss.backward()
    mean = loss.detach().clone()
    if PLAN.get("reduces") == "before":
        dist.all_reduce(mean)
    disturb(step, "stepping")
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if PLAN.get("reduces") != "before":
        dist.all_reduce(mean)
    state.losses = [*state.losses, mean.item() / dist.get_world_size()]
    same = digest(model, optimizer)
    tell("step", step=step, ids=ids.tolist(), digest=same, drawn=drawn(), losses=state.losses)
    if PLAN.get("stop") == step:
        state.commit(samples=len(ids))
        state.flush()
        dist.barrier()
        raise SystemExit(0)
    disturb(step, "before")
    disturb(step, "in")
    state.commit(samples=len(ids), metrics={"loss": state.losses[-1]} if PLAN.get("rows") else None)
    if PLAN.get("flush") == step:
        state.flush()
    while step in PLAN.get("protected", ()) and (state.protected_commit or 0) < step:
        time.sleep(0.01)
    disturb(step, "after")


def main():
    if PLAN.get("own_nodes"):
        move_to_own_node()
    ddp.init(PLAN.get("backend", "auto"), timeout=60)
    model = wrapped(PLAN["model"])
    optimizer = optimizer_of(PLAN["model"], model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)
    random.seed(RANK)
    np.random.seed(RANK)
    data = torch.randn(SIZE, 7, generator=torch.Generator().manual_seed(3))
    sampler = elastic.ElasticSampler(SIZE, seed=4)
    state = elastic.State(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, losses=[], **options()
    )
    loader = torch.utils.data.DataLoader(
        list(enumerate(data)), batch_size=BATCH, sampler=sampler, generator=torch.Generator()
    )

    def steps():
        disturb(0, "begins")
        for _epoch in sampler.epochs(PLAN["epochs"]):
            for ids, batch in loader:
                train_step(model, optimizer, scheduler, state, ids, batch)

    if PLAN.get("run"):
        state.run(steps)
    else:
        resumed = state.resume()
        if resumed:
            same = digest(model, optimizer)
            facts = {"number": resumed.number, "in_memory": resumed.in_memory, "digest": same}
            tell("resumed", losses=state.losses, drawn=drawn(), **facts)
        elif "start_from" in PLAN["state"]:
            tell("began", digest=digest(model, optimizer))
        steps()
    tell("end", losses=state.losses)
    state.close()
    ddp.shutdown()


main()
