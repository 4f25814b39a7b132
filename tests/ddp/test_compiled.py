"""What cannot be used while torch.compile's own reducer averages the gradients is refused in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from test_training import mlp

import ddp

if TYPE_CHECKING:
    from ranks import Ranks


def refused(rank: int) -> str:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = ddp.DistributedDataParallel(mlp())
        with pytest.raises(RuntimeError) as raised:
            ddp.check_numerics(model)
    return str(raised.value)


def test_what_needs_buckets_says_that_there_are_none(two_ranks: Ranks) -> None:
    text, _ = two_ranks(refused)
    assert "ddp.check_numerics" in text
    assert "optimize_ddp = 'python_reducer'" in text
    assert "'ddp_optimizer'" in text
