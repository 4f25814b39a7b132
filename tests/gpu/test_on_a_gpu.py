"""Our reducer on CUDA tensors: its hooks run on the streams of autograd, its collectives on others."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ddp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

_STEPS = 4


def network(size: int = 2048) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(size, size), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(size, 4)).cuda()


def trained(wrapper: type[Any], rank: int, given: dict[str, Any]) -> list[torch.Tensor]:
    """Nothing synchronises with the device before the end: whoever reads a gradient too soon shows in the result."""
    wrapped = wrapper(network(), device_ids=[0], **given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(_STEPS):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        wrapped(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def like_torch(rank: int, world_size: int, backend: str, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        for given in GIVEN:
            ours = trained(ddp.DistributedDataParallel, rank, given)
            torchs = trained(nn.parallel.DistributedDataParallel, rank, given)
            for mine, theirs in zip(ours, torchs, strict=True):
                torch.testing.assert_close(mine, theirs)
    finally:
        dist.destroy_process_group()


def on_ranks(world_size: int, backend: str) -> None:
    """All options in the same processes: a context on the GPU takes longer than the training."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(like_torch, (world_size, backend, store), nprocs=world_size)


GIVEN: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1},
    {"static_graph": True},
]


def test_one_rank_over_nccl() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    on_ranks(1, "nccl")


def test_several_ranks_over_gloo() -> None:
    on_ranks(3, "gloo")
