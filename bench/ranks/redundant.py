"""A rank of bench/redundancy.py: a GPT-like model under FSDP2, a commit in memory at every tenth step (EVERY).

MODE steps: blocks of ten steps, in turn with and without protection of their commit; writes the times of the blocks.
MODE prepare: one commit, until it is protected, with nothing else to do. MODE resume: resumes from it.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ddp
from ddp import elastic

MODE, OUT = os.environ["MODE"], Path(os.environ["OUT"])
EVERY = int(os.environ["EVERY"])


def tell(**facts: object) -> None:
    (OUT / f"{MODE}-{dist.get_rank()}.json").write_text(json.dumps(facts))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def files_bytes(kind: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(os.environ["DDP_SCRATCH"]).rglob(f"{kind}*"))


torch.set_num_threads(1)
torch.manual_seed(0)
ddp.init("gloo")
blocks = (nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.0) for _ in range(12))
model = nn.Sequential(nn.Embedding(8000, 384), *blocks)
for layer in model[1:]:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
state = elastic.State(
    model=model, optimizer=optimizer, step=0, every=EVERY, redundancy=os.environ["REDUNDANCY"]
)
began = time.perf_counter()
resumed = state.resume()
resume_s = time.perf_counter() - began


def step() -> None:
    model(torch.randint(0, 8000, (4, 64))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1
    state.commit()


def wait_until_protected() -> float:
    asked = time.perf_counter()
    while state.protected_commit != state._number:
        time.sleep(0.01)
    return time.perf_counter() - asked


def block(is_protected: bool) -> tuple[float, float]:
    """Ten steps after a commit that is protected meanwhile or not: seconds, and seconds of processor."""
    keeper = state._keeper
    shield, keeper._protection = keeper._protection, (keeper._protection if is_protected else None)
    step()  # the commit
    keeper._protection = shield
    dist.barrier()
    start, used = time.perf_counter(), cpu_s()
    for _ in range(EVERY - 1):
        step()
    dist.barrier()
    found = time.perf_counter() - start, cpu_s() - used
    if is_protected:
        wait_until_protected()
    return found


if MODE == "resume":
    assert resumed is not None
    tell(resume_s=resume_s, in_memory=resumed.in_memory)
else:
    step()
    start = cpu_s()
    for _ in range(EVERY - 1):
        step()
    dist.barrier()
    used = cpu_s()
    steps_cpu_s = (used - start) / max(1, EVERY - 1) * EVERY
    protecting_s = wait_until_protected()
    protecting_cpu_s = cpu_s() - used
    dist.barrier()
    if MODE == "steps":
        for _ in range(EVERY - 1):
            step()
        turns = [
            (block(number % 2 == 0), block(number % 2 == 1)) for number in range(int(os.environ["ROUNDS"]))
        ]
        pairs = [pair if number % 2 == 0 else pair[::-1] for number, pair in enumerate(turns)]
        tell(pairs=pairs, slots=files_bytes("local"), parity=files_bytes("parity"), protecting_s=protecting_s)
    else:
        tell(
            slots=files_bytes("local"),
            parity=files_bytes("parity"),
            protecting_s=protecting_s,
            protecting_cpu_s=protecting_cpu_s,
            steps_cpu_s=steps_cpu_s,
        )
    dist.barrier()
    os._exit(0)  # as a rank that is killed: its memory stays
