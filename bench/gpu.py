"""What our reducer costs on a GPU: one rank over NCCL, where there is nothing to communicate, beside torch's in C++.

    python bench/gpu.py [--rounds 7]

2,000 small parameters, and a GPT-like model. In every round each trains for a moment, in an order that alternates;
the figure is the median of the rounds' ratios. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

# The package, not the bench of its name beside this file.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_models"))

import torch
import torch.distributed as dist
from models import MODELS
from shown import option_parser

import ddp

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 30
WARM_UP_STEPS = 10
WRAPPERS: dict[str, Callable[..., Any]] = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "ours": ddp.DistributedDataParallel,
}


def turn(wrapped: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def compared(name: str, rounds: int) -> str:
    make, draw = MODELS[name]
    batch = draw().cuda()
    contenders = {}
    for kind, wrap in WRAPPERS.items():
        wrapped = wrap(make().cuda(), device_ids=[0])
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
        contenders[kind] = (wrapped, optimizer)
        turn(wrapped, optimizer, batch, WARM_UP_STEPS)
    taken: dict[str, list[float]] = {kind: [] for kind in contenders}
    for number in range(rounds):
        for kind in list(contenders)[:: 1 if number % 2 else -1]:
            taken[kind].append(turn(*contenders[kind], batch, STEPS))
    ratios = [ours / theirs for ours, theirs in zip(taken["ours"], taken["torch"], strict=True)]
    times = [f"{statistics.median(taken[kind]) * 1e3:.2f} ms" for kind in ("torch", "ours")]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
    return f"| {' | '.join([name, *times, spread])} |"


def main() -> None:
    options = option_parser(__doc__ or "").parse_args()
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print("skipped: torch sees no GPU here, or has no NCCL")
        return
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        print(f"{torch.cuda.get_device_name()}, one rank over NCCL\n\n| step | torch | ours | ratio |")
        print("|---|---:|---:|---:|")
        for name in ("2,000 x 1,000", "GPT-like, 30M"):
            print(compared(name, options.rounds), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
