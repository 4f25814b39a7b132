"""Each rank is a group of its own, with two States; rank 1 dies once."""

from __future__ import annotations

import json
import os
import signal

import torch.distributed as dist

import ddp
from ddp import elastic

RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["DDP_GENERATION"])


def refusal(group):
    try:
        elastic.State(x=0, group=group)
    except ValueError as error:
        return str(error)
    return ""


def main():
    ddp.init(timeout=60)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    assert "needs a scope" in refusal(groups[RANK])
    assert "is not in the group" in refusal(groups[1 - RANK])
    ours = elastic.State(x=RANK, group=groups[RANK], scope=f"stage{RANK}", folder=os.environ["THERE"])
    shared = elastic.State(y=100, scope="all")
    found = [each.resume() for each in (ours, shared)]
    if GENERATION == 1:
        ours.x += 10
        shared.y += 1
        for _commit in range(RANK + 2):
            ours.commit()
        ours.checkpoint()
        shared.commit()
        dist.barrier()
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    told = {"rank": RANK, "numbers": [each.number for each in found], "x": ours.x, "y": shared.y}
    with open(f"{os.environ['THERE']}/told-{RANK}", "w") as file:
        json.dump(told, file)
    dist.barrier()
    ours.close()
    shared.close()
    ddp.shutdown()


main()
