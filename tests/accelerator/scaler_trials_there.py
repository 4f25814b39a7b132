"""What runs in the ranks of test_narrow_types.py: GradScaler and narrow types, beside torch's class."""

from __future__ import annotations

from typing import Any

import emu
import torch
from averaging_trials_there import DEVICE, batch, layers, loss_of, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

import ddp


def scaled(
    wrapper: Any, rank: int, given: dict[str, Any]
) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    """-> the parameters at the end, the scale after each step, and which steps were left out. Rank 1 overflows once."""
    model = wrapper(layers().to(DEVICE), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)
    scales, skipped = [], []
    with emu.slow(kernels=0.0002, collectives=0.002):
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = loss_of(model, batch(rank, step))
            if (rank, step) == (1, 2):
                loss = loss * float("inf")
            before = model.module[0].weight.detach().clone()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            skipped.append(torch.equal(before, model.module[0].weight))
    return [p.detach().cpu() for p in model.parameters()], scales, skipped


def an_overflow(rank: int, given: dict[str, Any]) -> tuple[list[float], list[bool]]:
    wanted, their_scales, they_skipped = scaled(Torchs, rank, given)
    found, scales, skipped = scaled(ddp.DistributedDataParallel, rank, given)
    same(found, wanted)
    assert (scales, skipped) == (their_scales, they_skipped)
    return scales, skipped


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def mixed(wrapper: Any, rank: int, given: dict[str, Any]) -> list[torch.Tensor]:
    model = wrapper(Mixed().to(DEVICE), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with emu.slow(kernels=0.0002, collectives=0.002):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]


def like_torchs_mixed(rank: int, given: dict[str, Any]) -> None:
    same(mixed(ddp.DistributedDataParallel, rank, given), mixed(Torchs, rank, given))
