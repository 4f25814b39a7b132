"""Trains a tiny model inside `state.run` until it is told to stop, and tells when each world took its first step.

    many.py FOLDER                       as a rank; FOLDER is shared by all nodes

    FOLDER/worlds/GENERATION-RANK        who trains in this world, and when this rank had finished its first step there
    FOLDER/ends/RANK                     with which state it ended
    FOLDER/finish                        it is time to end

The gradient of `counter` is -1 in each step, and its learning rate is 1. So its value is the number of steps that the
parameters have seen: a step that is lost or done twice shows. There is no optimizer of torch: it imports torch._dynamo,
as long as torch itself, in each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ddp
from ddp import elastic

SHARED = Path(sys.argv[1])
PACE_S = 0.1  # what a real model would compute; the processors belong to all ranks of the job
TIMEOUT_S = 300.0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.counter = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).square().mean() - self.counter.sum()


@torch.no_grad()
def descend() -> None:
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        parameter -= (1.0 if name == "counter" else 0.01) * parameter.grad
        parameter.grad = None


def tell(folder: str, name: str, **what: object) -> None:
    """Whole or not at all."""
    part = SHARED / folder / f".{name}-{socket.gethostname()}"
    part.write_text(json.dumps(what))
    part.rename(SHARED / folder / name)


def step() -> None:
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * state.step + dist.get_rank()))
    model(inputs).backward()
    finish = torch.tensor([float(dist.get_rank() == 0 and (SHARED / "finish").exists())])
    dist.all_reduce(finish)  # before the parameters change: a failure here repeats the step
    descend()
    state.step += 1
    state.stop = bool(finish)
    state.commit()


def train() -> None:
    rank, generation = dist.get_rank(), os.environ["DDP_GENERATION"]
    here = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": dist.get_world_size()}
    began_at, began_after = time.time(), state.step
    while not state.stop:
        time.sleep(PACE_S)
        step()
        if state.step == began_after + 1:
            times = {"began_at": began_at, "stepped_at": time.time()}
            tell("worlds", f"{generation}-{rank}", after=began_after, **times, **here)


torch.set_num_threads(1)
ddp.init(timeout=TIMEOUT_S)
torch.manual_seed(0)
net = Net()
model = ddp.DistributedDataParallel(net)
state = elastic.State(model=model, step=0, stop=False)
state.run(train)
weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
digest = hashlib.sha256(weights).hexdigest()
tell("ends", str(dist.get_rank()), step=state.step, counter=net.counter.item(), digest=digest)
state.close()
ddp.shutdown()
