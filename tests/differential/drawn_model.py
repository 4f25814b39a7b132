"""The model of a drawn program: small layers, of which a forward uses some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drawn_program import Layer, Program

WIDTH = 4


class Broken(Exception):
    """What the script itself raises in a forward or a backward."""


@dataclass
class Out:
    """An output that torch does not search for tensors."""

    value: torch.Tensor


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Broken("in the backward")


class Bare(nn.Module):
    """A parameter by itself."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = {
            "bare": (WIDTH,),
            "scale": (WIDTH,),
            "sign": (WIDTH,),
            "scalar": (),
            "big": (4000, WIDTH),
            "column": (5, WIDTH),
        }
        weight = torch.randn(shapes[kind]).to(dtype)
        self.kind = kind
        self.weight = nn.Parameter(weight.t() if kind == "column" else weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bare":
            return x + self.weight
        if self.kind == "sign":  # its gradient is lazily conjugated, or lazily negated
            if self.weight.is_complex():
                return x * self.weight.conj()
            wide = self.weight.float()
            return x + torch.complex(wide, wide).conj().imag.to(x.dtype)
        if self.kind == "big":
            return x + self.weight[: x.shape[0]] * 0.5
        if self.kind == "column":
            return x @ self.weight[:, :WIDTH]
        return x * self.weight


class Count(nn.Module):
    """A buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.seen[0].to(x.dtype)


class Words(nn.Module):
    def __init__(self, dtype: torch.dtype, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=sparse, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0]) % 4
        # Scaled, so that a sparse gradient has values of its own: torch's class divides also what shares them.
        return x + self.table(rows) * 0.5


class Picture(nn.Module):
    """A convolution whose weight, and so its gradient, is stored with the channels last."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(nn.functional.pad(x.view(-1, 2, 1, 2), (0, 1, 0, 1))).reshape(x.shape)


class Net(nn.Module):
    def __init__(self, program: Program, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        dtype = getattr(torch, program.dtype)
        made: list[nn.Module] = []
        for i, layer in enumerate(program.layers):
            if layers is not None and i % 2 == 0:
                made.append(layers[i])
            else:
                made.append(_layer(layer, made, dtype))
        self.layers = nn.ModuleList(made)

    def forward(
        self,
        x: torch.Tensor,
        uses: Sequence[bool] = (),
        form: str = "",
        how: str = "",
        breaks: tuple[str, int] | None = None,
        touch: tuple[int, float] | None = None,
    ) -> Any:
        for i, layer in enumerate(self.layers):
            if uses and not uses[i]:
                continue
            if how:
                x = checkpoint(layer, x, use_reentrant=how == "reentrant")
            else:
                x = layer(x)
            if breaks == ("forward", i):
                raise Broken("in the forward")
            if breaks == ("backward", i) and x.requires_grad:
                x = Breaks.apply(x)
        if touch:  # the idiom that lets every parameter have a gradient
            x = x + touch[1] * sum((p.sum() for p in self.parameters_of(touch[0])), torch.zeros(()))
        return _formed(x, form)

    def parameters_of(self, i: int) -> list[nn.Parameter]:
        return list(self.layers[i].parameters())


def _formed(x: torch.Tensor, form: str) -> Any:
    if form == "tuple":
        return x, x * 2
    if form == "dict":
        return {"a": x, "b": [x * 2, 1]}
    if form == "object":
        return Out(x)
    if form == "partly":
        return x, x * 3
    return x


def value_of(out: Any, form: str) -> torch.Tensor:
    if form == "tuple":
        return out[0] + out[1]
    if form == "dict":
        return out["a"] + out["b"][0]
    if form == "object":
        return out.value
    if form == "partly":
        return out[1]
    return out


def _layer(layer: Layer, made: Sequence[nn.Module], dtype: torch.dtype) -> nn.Module:
    module = _untied(layer, dtype)
    if layer.tied_to is not None:
        module.weight = made[layer.tied_to].weight
    elif not layer.trained:
        module.requires_grad_(False)
    return module


def _untied(layer: Layer, dtype: torch.dtype) -> nn.Module:
    if layer.kind == "linear":
        return nn.Linear(WIDTH, WIDTH, dtype=dtype)
    if layer.kind == "norm":
        return nn.BatchNorm1d(WIDTH, dtype=dtype)
    if layer.kind == "count":
        return Count()
    if layer.kind == "embedding":
        return Words(dtype, layer.sparse)
    if layer.kind == "picture":
        return Picture(dtype)
    return Bare(layer.kind, dtype)
