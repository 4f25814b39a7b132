"""What runs in the ranks of test_ddp_there.py: our wrapper beside torch's, on slow kernels."""

from __future__ import annotations

import copy
from typing import Any

import emu
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

import ddp

DEVICE = "emu"


class Branches(nn.Module):
    """The middle is used in every other step; the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)
        self.sometimes, self.never = nn.Linear(40, 40), nn.Linear(2, 2)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.step % 2:
            x = torch.tanh(self.sometimes(x))
        return self.last(x)  # type: ignore[no-any-return]


def layers() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3)
    )


def branches() -> nn.Module:
    torch.manual_seed(7)
    return Branches()


def batch(rank: int, step: int, device: str = DEVICE) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def trained(wrapper: Any, model: nn.Module, rank: int, steps: int = 4, **given: Any) -> list[torch.Tensor]:
    """The parameters and buffers after some steps, with kernels and collectives that take their time."""
    wrapped = wrapper(model.to(DEVICE), **given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    with emu.slow(kernels=0.0002, collectives=0.002):
        for step in range(steps):
            model.step = step
            optimizer.zero_grad()
            loss_of(wrapped, batch(rank, step)).backward()
            optimizer.step()
        return [tensor.detach().cpu() for tensor in wrapped.state_dict().values()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def like_torchs(rank: int, model: str, given: dict[str, Any], theirs: dict[str, Any] | None = None) -> None:
    make = {"layers": layers, "branches": branches}[model]
    wanted = trained(Torchs, make(), rank, **(given if theirs is None else theirs))
    same(trained(ddp.DistributedDataParallel, make(), rank, **given), wanted)


def without_waiting(rank: int, given: dict[str, Any]) -> None:
    """A step enqueues, and waits for nothing."""
    wrapped = ddp.DistributedDataParallel(layers().to(DEVICE), **given)
    inputs = [batch(rank, step) for step in range(4)]
    for x in inputs[:3]:
        wrapped.zero_grad()
        loss_of(wrapped, x).backward()
    torch.accelerator.synchronize()
    before = emu.counters()
    with emu.slow(collectives=0.05), emu.no_host_sync():
        wrapped.zero_grad()
        loss_of(wrapped, inputs[3]).backward()
    after = emu.counters()
    assert after["collectives"] > before["collectives"]
    assert after["unforeseen_waits"] == before["unforeseen_waits"]
    same([p.grad.cpu() for p in wrapped.parameters()], averages(wrapped.module, rank, 3))


def averages(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    """The average gradients, without any reducer."""
    model = copy.deepcopy(model)
    model.zero_grad()
    loss_of(model, batch(rank, step)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    return [p.grad.cpu() for p in model.parameters()]


def proper(_state, bucket):  # type: ignore[no-untyped-def]  # torch would check the annotations
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(dist.get_world_size()))


def hasty(_state, bucket):  # type: ignore[no-untyped-def]
    """Says that it has the result, and reads before the collective is done."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / dist.get_world_size())
    return future


def right_with(rank: int, hook: str) -> bool:
    model = layers()
    wrapped = ddp.DistributedDataParallel(model.to(DEVICE))
    wrapped.register_comm_hook(None, {"proper": proper, "hasty": hasty}[hook])
    with emu.slow(collectives=0.05):
        loss_of(wrapped, batch(rank, 0)).backward()
        ours = [p.grad.cpu() for p in wrapped.parameters()]
        torch.accelerator.synchronize()
    wanted = averages(model, rank, 0)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, wanted, strict=True))
