"""Four ranks, each a node: two stages of two ranks, and each stage has a State of its own over shards.

STATE is what each State gets besides. In the first generation rank 3 is lost with its node after a protected commit.
The last one trains again, without a State and undisturbed, and tells whether both have the same bits.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddp
from ddp import elastic

RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["DDP_GENERATION"])
STAGE = RANK // 2
STEPS, LOST_AFTER = 5, 3


def move_to_own_node():
    since = 2 if RANK == 3 and GENERATION > 1 else 1
    os.environ["DDP_SCRATCH"] = f"{os.environ['THERE']}/node-{RANK}-since-{since}"
    Path(os.environ["DDP_SCRATCH"]).mkdir(mode=0o700, exist_ok=True)


def everything(shards):
    """What the State of this stage has: a model in shards, and a whole one."""
    torch.manual_seed(STAGE)
    in_shards = fully_shard(nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.Linear(10, 3)), mesh=shards)
    whole = ddp.DistributedDataParallel(nn.Linear(6, 5), process_group=shards.get_group())
    torch.manual_seed(100 + RANK)
    return {
        "in_shards": in_shards,
        "whole": whole,
        "optimizer": torch.optim.Adam(in_shards.parameters(), lr=0.01),
        "other": torch.optim.Adam(whole.parameters(), lr=0.02),
    }


def train_step(things, step):
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + RANK))
    (things["in_shards"](inputs).square().mean() + things["whole"](inputs).square().mean()).backward()
    for name in ("optimizer", "other"):
        things[name].step()
        things[name].zero_grad()


def all_of(things):
    local = [each.to_local() for each in things["in_shards"].parameters()]
    moments = [s.to_local() for each in things["optimizer"].state.values() for s in (each["exp_avg"],)]
    others = [each["exp_avg"] for each in things["other"].state.values()]
    return [*local, *moments, *things["whole"].parameters(), *others, torch.rand(3)]


def main():
    move_to_own_node()
    ddp.init(timeout=60)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    shards = mesh["shards"]
    things = everything(shards)
    options = json.loads(os.environ["STATE"])
    state = elastic.State(**things, step=0, group=shards.get_group(), scope=f"stage{STAGE}", **options)
    resumed = state.resume()
    while state.step < STEPS:
        train_step(things, state.step + 1)
        state.step += 1
        state.commit()
        if GENERATION == 1 and state.step == LOST_AFTER:
            while (state.protected_commit or 0) < LOST_AFTER:
                time.sleep(0.01)
            dist.barrier()
            if RANK == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    found = all_of(things)
    state.close()
    alone = everything(shards)
    for step in range(1, STEPS + 1):
        train_step(alone, step)
    same = [torch.equal(a, b) for a, b in zip(found, all_of(alone), strict=True)]
    told = {"resumed": resumed and [resumed.number, resumed.in_memory], "same": all(same), "of": len(same)}
    Path(os.environ["THERE"], f"told-{RANK}").write_text(json.dumps(told))
    dist.barrier()
    ddp.shutdown()


main()
