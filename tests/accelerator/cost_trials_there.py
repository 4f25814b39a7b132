"""What runs in the ranks of test_costs_there.py: one call per bucket, and the backend's own average."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import emu
import torch
import torch.distributed as dist
from averaging_trials_there import batch, layers, loss_of

from ddp import DistributedDataParallel
from ddp.reducer import device as under_test

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def backend_that_offers_its_average() -> Iterator[None]:
    backend = type(dist.group.WORLD._get_backend(torch.device("emu")))  # type: ignore[union-attr]
    backend.ddp_averages = True
    try:
        yield
    finally:
        del backend.ddp_averages


def reduced(wrapped: nn.Module, rank: int) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step after the first ones, and the kernels of its backward."""
    for step in range(4):
        wrapped.zero_grad()
        loss = loss_of(wrapped, batch(rank, step))
        torch.accelerator.synchronize()
        before = emu.counters()["kernels"]
        loss.backward()
        kernels = emu.counters()["kernels"] - before
    return [parameter.grad.cpu() for parameter in wrapped.parameters()], kernels  # type: ignore[union-attr]


def the_backend_averages(rank: int) -> tuple[int, int]:
    """The number of buckets, and how many kernels fewer it takes if the backend divides."""
    plain = DistributedDataParallel(layers().to("emu"), broadcast_buffers=False, bucket_cap_mb=0.005)
    wanted, with_division = reduced(plain, rank)
    with backend_that_offers_its_average():
        dividing = DistributedDataParallel(layers().to("emu"), broadcast_buffers=False, bucket_cap_mb=0.005)
        got, without = reduced(dividing, rank)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    return len(dividing.reducer.core.sender.buckets), with_division - without


def one_chunk_per_bucket(rank: int) -> tuple[int, int]:
    wrapped = DistributedDataParallel(layers().to("emu"), broadcast_buffers=False)
    reduced(wrapped, rank)
    core = wrapped.reducer.core
    return len(core.chunks), len(core.sender.buckets)


def a_launch_follows_the_copies(_rank: int) -> None:
    """Copies on a side stream; another thread, with another current stream, launches."""
    device, side = torch.device("emu", torch.accelerator.current_device_index()), torch.Stream("emu")
    bucket = torch.zeros(3, device=device)
    torch.accelerator.synchronize()
    gate = emu.Gate(side)
    noted: dict[int, list[torch.Stream]] = {}
    with side:
        bucket.add_(1)
        under_test.note_stream(noted, 0, device)
        under_test.note_stream(noted, 0, device)
    assert noted == {0: [side]}
    under_test.follow_streams(noted[0], device)
    sent = bucket.clone()
    gate.open()
    assert sent.tolist() == [1.0] * 3
    under_test.follow_streams(
        [torch.accelerator.current_stream(device)], device
    )  # it does not wait for itself
    assert not under_test.has_streams("cpu")
