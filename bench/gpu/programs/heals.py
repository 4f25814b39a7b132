"""A rank of the part `heal`: a compiled GPT trains inside `State.run`, and the last rank kills itself once.

It tells when it has finished the first step of each attempt. Under torchrun all ranks are new processes in the second
attempt; with `--recover in-place` the others go on.
"""

import os
import signal
import sys
import threading

import rank
import torch
import torch.distributed as dist
from gpu_models import MODELS
from stamp import stamp, wait_at_gate

import ddp
from ddp import elastic

where = rank.join()
make, loss = MODELS["gpt"](where)
torch.manual_seed(0)
ids = {"device_ids": [where]} if where.type == "cuda" else {}
model = ddp.DistributedDataParallel(make(), **ids)
compiled = torch.compile(model, backend="aot_eager" if rank.gpu_part.IS_REHEARSAL else "inductor")
optimizer = torch.optim.AdamW(model.parameters())
state = elastic.State(model=model, optimizer=optimizer, step=0, every=0)


def is_first() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def die_when_told() -> None:
    wait_at_gate()
    stamp("kill")
    os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    started_first = is_first()
    if started_first and dist.get_rank() == dist.get_world_size() - 1:
        threading.Thread(target=die_when_told, daemon=True).start()
    told = False
    while started_first or not told:
        optimizer.zero_grad()
        loss(compiled).backward()
        optimizer.step()
        rank.synchronize()
        state.step += 1
        state.commit()
        if not told:
            stamp("step")
            told = True


state.run(train)
state.close()
sys.stdout.flush()
rank.leave()
