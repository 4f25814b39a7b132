"""What runs in the ranks of test_emulated_device.py."""

from __future__ import annotations

import ctypes
import errno
import os

import emu
import pytest
import torch
import torch.distributed as dist
from torch import nn


def memory_is_out_of_reach(_rank: int) -> None:
    tensor = torch.ones(4, device="emu")
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.write(writer, ctypes.c_void_p(tensor.data_ptr()), 4) == -1
    assert ctypes.get_errno() == errno.EFAULT
    os.close(reader), os.close(writer)
    assert tensor.tolist() == [1.0] * 4


def early_reader(_rank: int) -> None:
    side = torch.Stream("emu")
    tensor = torch.zeros(3, device="emu")
    torch.accelerator.synchronize()
    gate = emu.Gate(side)
    with side:
        tensor.add_(1)
    assert tensor.tolist() == [0.0] * 3  # this stream has waited for nothing
    gate.open()
    torch.accelerator.current_stream().wait_stream(side)
    assert tensor.tolist() == [1.0] * 3


def freed_memory(_rank: int, recorded: bool) -> bool:
    """Whether a side stream still reads what was in a tensor that its own stream has let go of."""
    side = torch.Stream("emu")
    tensor = torch.full((100,), 7.0, device="emu")
    torch.accelerator.synchronize()
    gate = emu.Gate(side)
    with side:
        copy = tensor.clone()
    if recorded:
        tensor.record_stream(side)
    del tensor
    torch.full((100,), 9.0, device="emu")
    torch.accelerator.current_stream().synchronize()
    gate.open()
    torch.accelerator.current_stream().wait_stream(side)
    return copy.tolist() == [7.0] * 100


def waits_are_counted(_rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=False)
    x = torch.ones(3, 4, device="emu")
    emu.take_sync_reasons()
    with emu.no_host_sync():
        before = emu.counters()
        model(x).sum().backward()
        optimizer.step()
    after = emu.counters()
    assert after["kernels"] > before["kernels"]
    assert after["host_syncs"] == before["host_syncs"]
    assert after["unforeseen_waits"] == before["unforeseen_waits"]
    assert emu.take_sync_reasons() == []
    waits = {
        "_local_scalar_dense": lambda: x.sum().item(),
        "copy to the host": lambda: x.cpu(),
        "copy from the host": lambda: torch.ones(3).to("emu"),
        "nonzero": lambda: x.nonzero(),
        "stream.synchronize": lambda: torch.accelerator.current_stream().synchronize(),
        "device.synchronize": lambda: torch.accelerator.synchronize(),
    }
    for reason, operation in waits.items():
        with emu.no_host_sync(), pytest.raises(RuntimeError, match="synchronising operation"):
            operation()
        operation()
        assert reason in emu.take_sync_reasons()[-1]
    pinned = torch.ones(3, pin_memory=True)
    with emu.no_host_sync():
        there = pinned.to("emu", non_blocking=True) + 1
        back = torch.empty(3, pin_memory=True).copy_(there, non_blocking=True)
        event = torch.Event("emu")
        event.record()
    event.synchronize()
    assert back.tolist() == [2.0] * 3


def an_error_comes_later(_rank: int) -> None:
    table = torch.ones(4, 2, device="emu")
    table.index_select(0, torch.tensor([9], device="emu"))
    with pytest.raises(RuntimeError, match=r"earlier kernel failed.*index"):
        torch.accelerator.synchronize()
    assert table.sum().item() == 8.0  # told once


def time_passes(_rank: int) -> None:
    first, second = (torch.Event("emu", enable_timing=True) for _ in range(2))
    tensor = torch.ones(2, device="emu")
    with emu.slow(kernels=0.02):
        first.record()
        tensor.add_(1)
        second.record()
        assert not second.query()
        second.synchronize()
    assert first.elapsed_time(second) >= 20


def like_the_cpu(_rank: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )
    x, y = torch.randn(5, 2, 4, 4), torch.tensor([0, 1, 2, 1, 0])
    results = []
    for device in ("cpu", "emu:0", "emu:1"):
        model.zero_grad()
        model.to(device)
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        results.append([p.grad.cpu() for p in model.parameters()])
    for of_device in results[1:]:
        for ours, wanted in zip(of_device, results[0], strict=True):
            torch.testing.assert_close(ours, wanted)
    assert emu.counters()["unforeseen_waits"] == 0


def random_numbers_come_again(rank: int) -> None:
    def draw() -> torch.Tensor:
        return torch.cat([torch.rand(4, device="emu"), nn.functional.dropout(torch.ones(20, device="emu"))])

    torch.manual_seed(5)
    state = torch.emu.get_rng_state()
    drawn = draw()
    torch.emu.set_rng_state(state)
    assert torch.equal(draw(), drawn)
    torch.manual_seed(5)
    assert torch.equal(draw(), drawn)


def memory_has_an_end(_rank: int) -> None:
    used = torch.emu.memory_allocated()
    emu.set_memory_limit(used + 10_000)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10_000, device="emu")
    finally:
        emu.set_memory_limit(4 << 30)


def collectives_are_waited_for_by_streams(rank: int) -> None:
    tensor = torch.full((3,), float(rank), device="emu")
    torch.accelerator.synchronize()
    with emu.slow(collectives=0.05), emu.no_host_sync():
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
        early = tensor.clone()  # before the wait: what was there
        work.wait()  # returns at once
        assert not work.is_completed()
        late = tensor.clone()
    assert early.tolist() == [float(rank)] * 3
    assert late.tolist() == [0.5] * 3
    assert work.is_completed()
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    assert doubled.tolist() == [2.0] * 3


def collectives_give_what_gloo_gives(rank: int) -> None:
    def all_of(device: str) -> list[torch.Tensor]:
        mine = torch.arange(4.0, device=device) + 10 * rank
        results = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            results.append(mine.clone())
            dist.all_reduce(results[-1], op)
        results.append(mine.clone())
        dist.broadcast(results[-1], 1)
        gathered = [torch.zeros_like(mine) for _ in range(2)]
        dist.all_gather(gathered, mine)
        whole, part = torch.zeros(8, device=device), torch.zeros(2, device=device)
        dist.all_gather_into_tensor(whole, mine)
        dist.reduce_scatter_tensor(part, mine)
        swapped = torch.zeros(4, device=device)
        dist.all_to_all_single(swapped, mine)
        dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0)
        dist.barrier()
        half = torch.full((2,), 1.0 + rank, device=device, dtype=torch.bfloat16)
        dist.all_reduce(half)
        return [*results, *gathered, whole, part, swapped, mine, half]

    for there, here in zip(all_of("emu"), all_of("cpu"), strict=True):
        assert torch.equal(there.cpu(), here)
