"""For test_optimizers_there.py: each is compared with the same training on the CPU, or with torch's own way."""

from __future__ import annotations

import json
from typing import Any

import emu
import torch
from averaging_trials_there import DEVICE, Torchs, batch, layers, loss_of, same
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.averaging import DiLoCo, LocalSGD
from launcher.preflight import self_test

OURS = ddp.DistributedDataParallel


def in_the_backward(rank: int) -> None:
    """Each bucket's optimizer step runs on a stream of its own, as soon as the bucket is averaged."""
    results = []
    for overlapped in (False, True):
        model = layers().to(DEVICE)
        if overlapped:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
        wrapped = OURS(model, bucket_cap_mb=0.005)
        optimizer = None if overlapped else torch.optim.SGD(wrapped.parameters(), lr=0.05)
        inputs = [batch(rank, step) for step in range(5)]
        with emu.slow(kernels=0.0003, collectives=0.003):
            for x in inputs:
                loss_of(wrapped, x).backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([p.detach().cpu() for p in wrapped.parameters()])
    same(*results)


def averaged(rank: int, kind: str) -> None:
    results = []
    for device in ("cpu", DEVICE):
        wrapped = OURS(layers().to(device), broadcast_buffers=False)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        if kind == "diloco":
            policy: Any = DiLoCo(
                wrapped, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9), every=2, warmup=1
            )
        else:
            policy = LocalSGD(wrapped, every=2, warmup=1)
        inputs = [batch(rank, step, device) for step in range(6)]
        with emu.slow(kernels=0.0002, collectives=0.003):
            for x in inputs:
                with policy.step():
                    optimizer.zero_grad()
                    loss_of(wrapped, x).backward()
                    optimizer.step()
            results.append([tensor.detach().cpu() for tensor in wrapped.module.state_dict().values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def checkpointed(rank: int, reentrant: bool) -> None:
    results = []
    for wrapper in (Torchs, OURS):
        model = layers().to(DEVICE)
        inner = torch.nn.Sequential(*list(model)[3:])

        class Recomputed(torch.nn.Module):
            def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
                super().__init__()
                self.first, self.second = first, second

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.second, self.first(x), use_reentrant=reentrant)  # type: ignore[no-any-return]

        wrapped = wrapper(Recomputed(torch.nn.Sequential(*list(model)[:3]), inner), static_graph=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        inputs = [batch(rank, step) for step in range(4)]
        with emu.slow(kernels=0.0002, collectives=0.003):
            for x in inputs:
                optimizer.zero_grad()
                loss_of(wrapped, x).backward()
                optimizer.step()
            results.append([p.detach().cpu() for p in wrapped.parameters()])
    same(*results)


def load_test(_rank: int) -> None:
    """The self-test of pre-flight, on matrices of a size for an emulation."""
    self_test._SIDE_THERE, self_test._COPY_BYTES_THERE, self_test._TRY_S = 32, 1 << 12, 0.02
    told = self_test._tried(torch, "emu:1", torch.emu.get_device_name(1))
    assert told["name"] == "emulated accelerator 1", json.dumps(told)
    assert told["flops"] > 0, json.dumps(told)
    assert told["copy_bps"] > 0
    assert not told["wrong"]
