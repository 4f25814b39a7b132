"""Trains through `ddp.elastic`; in each attempt but the last one, the last rank kills itself in a step.

heals.py DEATHS [mlp|gpt] [ours|torch] [compile]
"""

import os
import signal
import statistics
import sys
import threading
import time

import torch
import torch.distributed as dist
from stamp import stamp, wait_at_gate

import ddp
from ddp import elastic

DEATHS = int(sys.argv[1])
SAMPLE = 25  # steps
os.environ.setdefault("DDP_BACKEND", "gloo")


def network() -> torch.nn.Module:
    if "gpt" in sys.argv:
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])


ddp.init()
torch.manual_seed(1)
wrap = torch.nn.parallel.DistributedDataParallel if "torch" in sys.argv else ddp.DistributedDataParallel
model = wrap(torch.compile(network()) if "compile" in sys.argv else network())  # torch does not trace its DDP
optimizer = torch.optim.AdamW(model.parameters())
state = elastic.State(model=model, optimizer=optimizer, step=0, every=100, stop=False)
inputs = torch.randn(8, 64, 256) if "gpt" in sys.argv else torch.randn(32, 512)


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def die_when_told() -> None:
    wait_at_gate()
    stamp("kill")
    os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    first = True
    taken: list[float] = []
    if attempt() < DEATHS and dist.get_rank() == dist.get_world_size() - 1:
        threading.Thread(target=die_when_told, daemon=True).start()
    while attempt() < DEATHS or first:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        taken.append(time.perf_counter() - began)
        if first:
            stamp("stepped")
            first = False
        if len(taken) == SAMPLE:
            stamp(f"step_s={statistics.median(taken):.6f}")


state.run(train)
stamp(f"steps={state.step}")
state.close()
ddp.shutdown()
