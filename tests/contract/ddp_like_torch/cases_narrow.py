"""Parameters and buffers of one byte: torch's class fails in the broadcast, without a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from models import square
from register import better
from torch import nn

if TYPE_CHECKING:
    from trial import Trial

_FP8 = torch.float8_e4m3fn


class Quantized(nn.Module):
    """A weight in FP8 that is cast in the forward, a buffer in FP8, and an adapter in float32."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).to(_FP8), requires_grad=trained)
        self.register_buffer("table", torch.randn(3, 6).to(_FP8))
        self.adapter = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.adapter(x @ self.weight.float()) + self.table.float().sum(0)
        return out


def everywhere(tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same values."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return all(torch.equal(tensor, each) for each in found)


def attempt(trial: Trial, act: Any) -> Any:
    try:
        result = act()
    except (RuntimeError, TypeError) as error:
        trial.note("outcome", trial.caught_as(error))
        trial.remark("outcome", str(error))
        return None
    trial.note("outcome", "right" if result else "wrong")
    return result


@better(
    torch="RuntimeError",
    ours="TypeError",
    says={"outcome": ["'weight'", "float8_e4m3fn", "bfloat16 or wider", "freeze"]},
)
def a_trained_parameter_in_fp8(trial: Trial) -> None:
    attempt(trial, lambda: trial.wrap(Quantized(trained=True)))


@better(torch="RuntimeError", ours="right")
def a_frozen_parameter_and_a_buffer_in_fp8(trial: Trial) -> None:
    """Both are those of rank 0, and the buffer is again before each forward."""

    def train() -> bool:
        module = Quantized(trained=False)
        model = trial.wrap(module)
        for step in range(3):
            module.table.copy_(torch.full((3, 6), float(trial.rank + step)).to(_FP8))
            model.zero_grad()
            square(model(trial.data(4, 6, step=step))).backward()
        seen = (module.weight.float(), module.adapter.weight.grad)
        return bool((module.table.float() == 2).all()) and all(map(everywhere, seen))

    attempt(trial, train)
