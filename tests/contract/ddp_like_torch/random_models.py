"""Models drawn by chance, as plain descriptions that can be sent to a rank, and the case that trains one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from models import observe
from torch import nn

if TYPE_CHECKING:
    from trial import Trial

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Piece:
    """One parameter: its form, and what becomes of it."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    trained: bool = True
    same_as: int | None = None  # an earlier piece whose parameter this one shares


@dataclass(frozen=True)
class Description:
    pieces: tuple[Piece, ...]
    used: tuple[tuple[int, ...], ...]  # for each step, the pieces that take part, the same on all ranks
    rank_differs: bool  # in each step, one of the ranks leaves its last piece out
    cap_mb: float
    as_view: bool
    set_to_none: bool
    synced: tuple[bool, ...]


class Pieced(nn.Module):
    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        super().__init__()
        for number, piece in enumerate(pieces):
            self.register_parameter(f"p{number}", self._made(piece))

    def _made(self, piece: Piece) -> nn.Parameter:
        if piece.same_as is not None:
            found: nn.Parameter = getattr(self, f"p{piece.same_as}")
            return found
        # Eighths: sums of a few of them are exact in every type used here, in whatever order.
        values = torch.randint(-8, 9, piece.shape).to(DTYPES[piece.dtype]) / 8
        return nn.Parameter(values, requires_grad=piece.trained)

    def forward(self, used: tuple[int, ...], factor: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number in used:
            parameter = getattr(self, f"p{number}")
            total = total + (parameter * factor * (1 + number % 3)).sum().to(torch.float64)
        return total


def train_described(trial: Trial, about: Description) -> None:
    """Gradients are whole numbers over a power of two: bits must agree whatever the plan, on any number of ranks."""
    torch.manual_seed(0)
    module = Pieced(about.pieces)
    options: dict[str, Any] = {"bucket_cap_mb": about.cap_mb, "gradient_as_bucket_view": about.as_view}
    model = trial.wrap(module, find_unused_parameters=True, **options)
    for step, (used, synced) in enumerate(zip(about.used, about.synced, strict=True)):
        if about.rank_differs and trial.rank == step % trial.world_size:
            used = used[:-1]
        if about.synced[step - 1] if step else False:
            model.zero_grad(set_to_none=about.set_to_none)
        if not synced:
            with model.no_sync():
                pass_through(model, used, float(trial.rank + 1))
        else:
            pass_through(model, used, float(trial.rank + 1))
        observe(trial, f"step {step}", model, alike=synced)


def pass_through(model: Any, used: tuple[int, ...], factor: float) -> None:
    out = model(used, factor)
    if out.requires_grad:
        out.backward()
