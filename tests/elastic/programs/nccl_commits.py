"""A training whose state NCCL would spoil: an all-reduce that the launcher aborts returns without an error.

The script handles SIGTERM as many do: it finishes its step, commits, and then ends. The network card of rank 1 fails in
the first generation: in a step whose script updates the weights itself, in one with an optimizer of torch, or while all
ranks make a checkpoint together.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

THERE = Path(os.environ["THERE"])
sys.path.append(os.environ["NCCL_LIKE"])
import nccl_like  # noqa: E402
from nccl_like.faults import system_error  # noqa: E402

from ddp import elastic  # noqa: E402

WHAT, STEPS, BROKEN_AT = sys.argv[1], 12, 7  # the eighth step, after which there is a checkpoint
asked_to_end = []
signal.signal(signal.SIGTERM, lambda _signum, _frame: asked_to_end.append(True))
nccl_like.register()
dist.init_process_group(nccl_like.group.NAME)
rank, generation = dist.get_rank(), int(os.environ["DDP_GENERATION"])
model = torch.nn.Linear(4, 1, bias=False)
weight = model.weight
torch.nn.init.zeros_(weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = elastic.State(model=model, step=0, folder=THERE / "commits", disk_every=3)
state.resume()
if rank == 0:
    with (THERE / "resumed").open("a") as file:
        file.write(f"{generation} {state.step} {weight.sum().item():g}\n")
while state.step < STEPS:
    breaks = generation == 1 and rank == 1 and state.step == BROKEN_AT
    error = nccl_like.Fault(system_error("NET/IB : mlx5_0:1 Got async event : port error"), leaves=True)
    if breaks and WHAT != "checkpoint":
        nccl_like.break_down(error)
    weight.grad = torch.full((1, 4), -1.0)
    dist.all_reduce(weight.grad)
    if WHAT == "optimizer":
        optimizer.step()
    else:
        with torch.no_grad():
            weight -= weight.grad
    state.step += 1
    if breaks and WHAT == "checkpoint":
        nccl_like.break_down(error)
    state.checkpoint() if state.step % 4 == 0 else state.commit()
    if asked_to_end:
        sys.exit(143)
state.close()
(THERE / f"done-{rank}").write_text(f"{generation} {weight.sum().item():g}")
dist.barrier()
dist.destroy_process_group()
os._exit(0)
