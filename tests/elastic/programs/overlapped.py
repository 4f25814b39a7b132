"""A training on the emulated accelerator whose rank 0 is killed while a commit is on its way to the host.

In each generation it is killed at another point. Each rank tells the bits of each of its steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.append(os.environ["EMU"])
import emu
import torch
from torch import nn

import ddp
from ddp import elastic
from ddp.elastic import keeper
from ddp.elastic.images import image

THERE, STEPS, POINTS = Path(os.environ["THERE"]), 24, os.environ["POINTS"].split()
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["DDP_GENERATION"])
KILLED_AT = 5  # commits of a generation before the one with which it is killed


def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def tear(buffer):
    """Half of the tensors are there."""
    BEGIN(buffer)
    buffer[4096 : len(buffer) // 2] = b"\xab" * (len(buffer) // 2 - 4096)
    die()


def end(buffer, index):
    FINISH(buffer, index)
    die()


BEGIN, FINISH = image.begin, image.finish


def arrange_death(point, copies):
    match point:
        case "under-way":
            gate = emu.Gate(copies)
            keeper.time = type("time", (), {"sleep": die})  # the thread that waits for the copy
            return gate
        case "begun":
            image.begin = tear
        case "copied":
            image.finish = die
        case "complete":
            image.finish = end


def digest(model, optimizer):
    found = hashlib.sha256()
    for each in (*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())):
        found.update(each.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def tell(**facts):
    with open(THERE / f"told-{RANK}", "a") as file:
        file.write(json.dumps({"generation": GENERATION} | facts) + "\n")


torch.manual_seed(10 + RANK)
ddp.init("cpu:gloo,emu:eccl", device="emu:0")
model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.Tanh(), nn.Linear(40, 3)).to("emu")
model = ddp.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer, step=0)
resumed = state.resume()
tell(resumed=None if resumed is None else resumed.number)
point = POINTS[GENERATION - 1] if GENERATION <= len(POINTS) else None
gates = []
with emu.slow(kernels=0.0002, collectives=0.001):
    for number in range(1, STEPS - state.step + 1):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(state.step * 2 + RANK)).to("emu")
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        tell(step=state.step, digest=digest(model, optimizer))
        if RANK == 0 and number == KILLED_AT and point is not None:
            state.flush()
            gates.append(arrange_death(point, next(iter(state._keeper._overlap._snapshot._streams.values()))))
        state.commit()
state.close()
