"""The models of the benchmarks, in the sizes that people train. In a rehearsal they are small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rank
import torch
from models import Block, resnet
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

_SMALL = rank.gpu_part.IS_REHEARSAL


class Gpt(nn.Module):
    """GPT-2 in its smallest published size: 124M parameters, the head shares the matrix of the words."""

    def __init__(self) -> None:
        super().__init__()
        words, width, depth, heads = (100, 32, 2, 2) if _SMALL else (50257, 768, 12, 12)
        self.context = 16 if _SMALL else 512
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places.weight[: x.shape[1]]
        return self.head(self.last(self.blocks(x)))


class Many(nn.Module):
    """2,000 tensors of 1,000 elements."""

    def __init__(self) -> None:
        super().__init__()
        count = 50 if _SMALL else 2000
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1000) * 0.01) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * x).sum() for part in self.parts])


def small_resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000)),
    )


def _lower(where: torch.device) -> Any:
    """bf16 where it is quick."""
    return torch.autocast(where.type, torch.bfloat16, enabled=where.type != "cpu")


def gpt(where: torch.device) -> tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]:
    words, batch, context = (100, 2, 16) if _SMALL else (50257, 8, 512)
    torch.manual_seed(1 + rank.RANK)
    text = torch.randint(0, words, (batch, context + 1), device=where)

    def loss(model: Any) -> torch.Tensor:
        with _lower(where):
            said = model(text[:, :-1])
        return functional.cross_entropy(said.float().flatten(0, 1), text[:, 1:].flatten())

    return lambda: Gpt().to(where), loss


def many(where: torch.device) -> tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]:
    torch.manual_seed(1 + rank.RANK)
    batch = torch.randn(1000, device=where)
    return lambda: Many().to(where), lambda model: model(batch).square().mean()


def resnet_50(where: torch.device) -> tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]:
    side, batch = (16, 2) if _SMALL else (224, 64)
    torch.manual_seed(1 + rank.RANK)
    layout = torch.channels_last
    pictures = torch.randn(batch, 3, side, side, device=where).to(memory_format=layout)
    labels = torch.randint(0, 1000, (batch,), device=where)

    def loss(model: Any) -> torch.Tensor:
        with _lower(where):
            said = model(pictures)
        return functional.cross_entropy(said.float(), labels)

    make = small_resnet if _SMALL else resnet
    return lambda: make().to(where, memory_format=layout), loss


MODELS = {"gpt": gpt, "many": many, "resnet": resnet_50}
TITLES = {"gpt": "GPT, 124M", "many": "2,000 small parameters", "resnet": "ResNet-50"}
