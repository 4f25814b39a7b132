"""Small modules to train, and what is observed of one after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from trial import Trial


class Mlp(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(x))))
        return out


class SometimesUnused(nn.Module):
    """Layers that a call may leave out: `used` names those that run."""

    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = ()) -> torch.Tensor:
        for number in used:
            x = torch.tanh(self.layers[number](x))
        return x


class MixedTypes(nn.Module):
    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(5, 3).to(dtype)) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros((), dtype=torch.float64)
        for weight in self.weights:
            scaled = weight * x.to(weight.dtype if not weight.is_complex() else torch.float32)
            part = scaled.abs() if scaled.is_complex() else torch.tanh(scaled)
            total = total + (part * part).sum().to(torch.float64)
        return total


class Buffered(nn.Module):
    """A buffer of every kind, changed by the rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("narrow", torch.zeros(4, dtype=torch.float16))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x))
        self.total += x.detach().sum(0)
        self.narrow += x.detach().mean(0).half()
        self.passing += x.detach().mean()
        return out


def observe(trial: Trial, when: str, module: nn.Module, alike: bool = True) -> None:
    """Gradients and parameters, as torch shows them; they must be the same bits on every rank."""
    for name, parameter in module.named_parameters():
        trial.note(f"{when} {name}.grad", parameter.grad, alike=alike)
        trial.note(f"{when} {name}", parameter, alike=alike)


def buffers(trial: Trial, when: str, module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        trial.note(f"{when} {name}", buffer)


def square(out: Any) -> torch.Tensor:
    loss: torch.Tensor = (out.float() if not out.is_complex() else out.abs()).pow(2).mean()
    return loss


def train(
    trial: Trial,
    model: Any,
    batch: Callable[[int], Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 3,
    loss_of: Callable[[Any], torch.Tensor] = square,
    set_to_none: bool = True,
) -> None:
    """The plain loop, everything that can be seen of it noted."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model(batch(step)))
        loss.backward()
        trial.note(f"step {step}: loss", loss)
        observe(trial, f"step {step}: after backward", model)
        optimizer.step()
        observe(trial, f"step {step}: after the optimizer", model)
        buffers(trial, f"step {step}", model)
