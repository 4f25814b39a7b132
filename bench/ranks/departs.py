"""Trains through `ddp.elastic` at a pace of 20 ms a step, and stamps each step with its number, until a file is there.

departs.py FILE
"""

import os
import sys
import time

import torch
from stamp import stamp

import ddp
from ddp import elastic

os.environ.setdefault("DDP_BACKEND", "gloo")
ddp.init()
torch.manual_seed(1)
model = ddp.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
optimizer = torch.optim.AdamW(model.parameters())
state = elastic.State(model=model, optimizer=optimizer, step=0, is_over=False)


def train() -> None:
    while not state.is_over:
        time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        state.step += 1
        over = torch.tensor(float(os.path.exists(sys.argv[1])))
        torch.distributed.all_reduce(over)
        state.is_over = bool(over)
        state.commit()
        stamp(f"step={state.step}")


state.run(train)
state.close()
ddp.shutdown()
