"""What runs for test_ddp_options_there.py: hooks, no_sync, join, precision, diagnostics, several devices."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import emu
import pytest
import torch
import torch.distributed as dist
from averaging_trials_there import DEVICE, Torchs, batch, layers, loss_of, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp
from ddp.groups import wrappers

OURS = ddp.DistributedDataParallel

# Hooks of torch; the state is made anew for each model.
HOOKS: dict[str, tuple[Any, Any]] = {
    "torchs_all_reduce": (lambda: None, default_hooks.allreduce_hook),
    "torchs_fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "torchs_power": (
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
}


def with_hook(rank: int, hook: str) -> None:
    """As with torch's wrapper."""
    results = []
    for wrapper, device in ((Torchs, DEVICE), (OURS, DEVICE)):
        torch.manual_seed(3)
        make, function = HOOKS[hook]
        wrapped = wrapper(layers().to(device), bucket_cap_mb=0.005)
        wrapped.register_comm_hook(make(), function)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        with emu.slow(kernels=0.0001, collectives=0.002):
            for step in range(4):
                optimizer.zero_grad()
                loss_of(wrapped, batch(rank, step, device)).backward()
                optimizer.step()
        results.append([p.detach().cpu() for p in wrapped.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if "power" in hook else 1e-3, atol=1e-4)


def accumulated(rank: int, given: dict[str, Any]) -> None:
    results = []
    for wrapper in (Torchs, OURS):
        wrapped = wrapper(layers().to(DEVICE), **given)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        with emu.slow(kernels=0.0001, collectives=0.002):
            for step in range(6):
                with wrapped.no_sync() if step % 3 else contextlib.nullcontext():
                    loss_of(wrapped, batch(rank, step)).backward()
                if step % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append([p.detach().cpu() for p in wrapped.parameters()])
    same(*results)


def joined(rank: int, given: dict[str, Any]) -> None:
    """Rank 1 has fewer batches."""
    results = []
    for wrapper in (Torchs, OURS):
        wrapped = wrapper(layers().to(DEVICE), **given)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        with emu.slow(collectives=0.002), wrapped.join():
            for step in range(5 - 2 * rank):
                optimizer.zero_grad()
                loss_of(wrapped, batch(rank, step)).backward()
                optimizer.step()
        results.append([p.detach().cpu() for p in wrapped.parameters()])
    same(*results)


def mixed(rank: int, given: dict[str, Any]) -> None:
    """The module's own mixed precision: parameters and gradients in bfloat16 on the way, and nobody reads too early."""
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).to(DEVICE)
    alone = copy.deepcopy(model)
    wrapped = OURS(model, mixed_precision=precision, **given)
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (wrapped, alone))
    inputs = [batch(rank, step) for step in range(6)]
    with emu.slow(kernels=0.0005, collectives=0.005):
        for x in inputs:
            ours.zero_grad()
            loss_of(wrapped, x).backward()
            ours.step()
    for step in range(6):
        low = copy.deepcopy(alone).to(torch.bfloat16)
        low.zero_grad()
        loss_of(low, batch(rank, step).to(torch.bfloat16)).backward()
        for parameter, there in zip(alone.parameters(), low.parameters(), strict=True):
            dist.all_reduce(there.grad)
            parameter.grad = there.grad.div_(2).float()
        plain.step()
    assert all(p.dtype == torch.float32 for p in wrapped.parameters())
    same([p.detach().cpu() for p in wrapped.parameters()], [p.detach().cpu() for p in alone.parameters()])


class Interrupted(Exception):
    pass


def healed(rank: int, kind: str, where: str) -> None:
    """A step with mixed precision is interrupted, as by the death of a rank; the model trains on with the same bits."""
    from torch.nn.parallel.distributed import _MixedPrecision

    def interrupt(*_given: Any) -> None:
        raise Interrupted

    wrappers.watch()
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    results = []
    for is_interrupted in (False, True):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3)).to(
            DEVICE
        )
        wrapped = {"ours": OURS, "torchs": Torchs}[kind](
            model, mixed_precision=precision, bucket_cap_mb=0.0005
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(5):
            if is_interrupted and step == 2:
                register = (
                    model[2].register_forward_hook
                    if where == "forward"
                    else model[2].register_full_backward_hook
                )
                handle = register(interrupt)
                with pytest.raises(Interrupted):
                    loss_of(wrapped, batch(rank, step)).backward()
                handle.remove()
                emu.synchronize()
                wrappers.renew_all()
                assert all(p.dtype == torch.float32 and p.grad is None for p in wrapped.parameters())
            optimizer.zero_grad()
            loss_of(wrapped, batch(rank, step)).backward()
            optimizer.step()
            emu.synchronize()
        results.append([p.detach().cpu() for p in wrapped.parameters()])
    if (
        kind == "ours"
    ):  # torch's class does not wait for the average: it has wrong numbers also without a failure
        same(*results)


def under_autocast(rank: int) -> None:
    """With a gradient scaler, which skips a step that overflows on one rank."""
    results = []
    for wrapper in (Torchs, OURS):
        wrapped = wrapper(layers().to(DEVICE))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
        with emu.slow(kernels=0.0001, collectives=0.002):
            for step in range(4):
                optimizer.zero_grad()
                x = batch(rank, step)
                if step == 2 and rank == 1:
                    x = x * float("inf")
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    assert wrapped.module[0](x).dtype == torch.bfloat16
                    loss = loss_of(wrapped, x)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert scaler.get_scale() == 2.0**9
        results.append([p.detach().cpu() for p in wrapped.parameters()])
    same(*results)


def steps(wrapped: nn.Module, rank: int, count: int) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    with emu.slow(kernels=0.0001, collectives=0.002):
        for step in range(count):
            optimizer.zero_grad()
            loss_of(wrapped, batch(rank, step)).backward()
            optimizer.step()


def checked(rank: int) -> None:
    """Rank 1 has a NaN: both ranks raise, and name rank 1."""
    wrapped = OURS(layers().to(DEVICE))
    ddp.check_numerics(wrapped, replicas_every=2)
    steps(wrapped, rank, 4)
    x = batch(rank, 9) * (float("nan") if rank else 1.0)
    with pytest.raises(ddp.NumericsError, match="rank 1 has NaN"):  # noqa: PT012
        for _ in range(3):
            wrapped.zero_grad()
            loss_of(wrapped, x).backward()
            torch.accelerator.synchronize()


class TwoPlaces(nn.Module):
    """Layers on two devices, which autograd runs on two threads."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40)).to(first)
        self.second = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40)).to(second)
        self.last = nn.Linear(40, 3).to(first)
        self.places = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.places
        apart = self.second(x.to(second)).to(first)
        return self.last(torch.tanh(self.first(x.to(first)) + apart))  # type: ignore[no-any-return]


def on_two(rank: int, first: str, second: str, given: dict[str, Any]) -> None:
    model = TwoPlaces(first, second)
    alone = copy.deepcopy(model)
    wrapped = OURS(model, **given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    with emu.slow(kernels=0.0001, collectives=0.002):
        for step in range(5):
            for each in (optimizer, plain):
                each.zero_grad()
            loss_of(wrapped, batch(rank, step, first)).backward()
            optimizer.step()
            torch.stack([loss_of(alone, batch(r, step, first)) for r in range(2)]).mean().backward()
            plain.step()
    ours, wanted = ([p.detach().cpu() for p in each.parameters()] for each in (wrapped, alone))
    same(ours, wanted)


def on_two_types(_rank: int) -> None:
    for places in (("emu", "cpu"), ("cpu", "emu")):
        with pytest.raises(ValueError, match="same type of devices"):
            OURS(TwoPlaces(*places))
