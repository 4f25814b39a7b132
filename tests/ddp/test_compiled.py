"""What cannot be used while torch.compile's own reducer averages the gradients is refused in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from test_training import mlp

import ddp
from ddp import comm_hooks

if TYPE_CHECKING:
    from pathlib import Path

    from ranks import Ranks


def refused(rank: int, folder: str) -> list[str]:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = ddp.DistributedDataParallel(mlp())
    attempts = (
        lambda: ddp.check_numerics(model),
        lambda: ddp.trace(model, f"{folder}/steps.json").__enter__(),
        lambda: ddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1),
        lambda: model.register_comm_hook(None, comm_hooks.bf16),
        lambda: model.register_comm_hook(None, comm_hooks.fp16_around(comm_hooks.all_reduce)),
        lambda: ddp.DistributedDataParallel(mlp(), bucket_cap_mb="auto"),
    )
    texts = []
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        for attempt in attempts:
            with pytest.raises((RuntimeError, TypeError)) as raised:
                attempt()
            texts.append(str(raised.value))
    return texts


def test_what_needs_buckets_says_that_there_are_none(two_ranks: Ranks, tmp_path: Path) -> None:
    texts, _ = two_ranks(refused, str(tmp_path))
    names = ("ddp.check_numerics", "ddp.trace", "ShardedOptimizer", "bf16", "fp16_around(all_reduce)", "auto")
    for name, text in zip(names, texts, strict=True):
        assert name in text
        assert "optimize_ddp = 'python_reducer'" in text
        assert "'ddp_optimizer'" in text
