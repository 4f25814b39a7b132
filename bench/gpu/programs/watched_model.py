"""A model whose step takes as long as one likes."""

from __future__ import annotations

import time

import torch
from torch import nn

_WIDTH = 512


class Chain(nn.Module):
    """Four layers, gone through `repeats` times."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.layers = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            x = self.layers(x)
        return x

    @staticmethod
    def inputs(where: torch.device) -> torch.Tensor:
        return torch.randn(4096 if where.type == "cuda" else 16, _WIDTH, device=where)


def repeats_for(step_s: float, where: torch.device) -> int:
    """How often the layers have to be gone through for a step of about this length."""
    took = {repeats: _step_s(repeats, where) for repeats in (1, 5)}
    each = max(1e-6, (took[5] - took[1]) / 4)
    return max(1, round((step_s - took[1]) / each))


def _step_s(repeats: int, where: torch.device, steps: int = 10) -> float:
    model, inputs = Chain(repeats).to(where), Chain.inputs(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    began = 0.0
    for number in range(2 * steps):
        if number == steps:  # the first ones warm up
            began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if where.type != "cpu":
            torch.get_device_module(where.type).synchronize()
    return (time.perf_counter() - began) / steps
