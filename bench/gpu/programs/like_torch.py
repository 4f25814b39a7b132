"""A rank that trains the same model under torch's DDP and under ours, with the same data, and compares the parameters.

Nothing waits for the device before the end of a training: a gradient that is read too soon shows in the result.
"""

from __future__ import annotations

from typing import Any

import rank
import torch
from torch import nn

import ddp

_STEPS = 4
_SIZE = 64 if rank.gpu_part.IS_REHEARSAL else 1024
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1},
    {"static_graph": True},
    {"find_unused_parameters": True},
)


class Network(nn.Module):
    """With a branch that some ranks leave out in some steps, where that is permitted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(_SIZE, _SIZE), nn.GELU()))
        )
        self.branch = nn.Linear(_SIZE, _SIZE)
        self.head = nn.Linear(_SIZE, 4)

    def forward(self, x: torch.Tensor, with_branch: bool) -> torch.Tensor:
        x = self.layers(x)
        return self.head(x + self.branch(x) if with_branch else x)


def trained(
    wrapper: Any, where: torch.device, given: dict[str, Any], accumulates: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Network().to(where)
    wrapped = wrapper(model, device_ids=[where] if where.type != "cpu" else None, **given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(_STEPS):
        torch.manual_seed(10 * step + rank.RANK)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with_branch = not given.get("find_unused_parameters") or (step + rank.RANK) % 2 == 0
        if accumulates:
            with wrapped.no_sync():
                wrapped(torch.randn(16, _SIZE, device=where), with_branch).square().mean().backward()
        wrapped(torch.randn(16, _SIZE, device=where), with_branch).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def main() -> None:
    where = rank.join()
    cases = [(given, False) for given in _OPTIONS] + [({}, True)]
    for given, accumulates in cases:
        ours = trained(ddp.DistributedDataParallel, where, given, accumulates)
        torchs = trained(nn.parallel.DistributedDataParallel, where, given, accumulates)
        for mine, theirs in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, theirs)
        print(f"rank {rank.RANK}: equal with {given}{', no_sync' * accumulates}", flush=True)
    rank.leave()


if __name__ == "__main__":
    main()
