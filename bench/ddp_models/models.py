"""What is trained: models whose gradients differ in size, number and timing. Inputs are small, for what counts here is
what happens to the gradients."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


class Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        made = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, made, 1, bias=False), nn.BatchNorm2d(made)),
        )
        self.past: nn.Module = nn.Identity()
        if stride != 1 or given != made:
            self.past = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.past(x))


def resnet(depths: tuple[int, int, int, int] = (3, 4, 6, 3)) -> nn.Module:
    """The layers of ResNet-50: 161 parameters, 25.6M elements. ResNet-152 has (3, 8, 36, 3) blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    given = 64
    for blocks, width, stride in zip(depths, (64, 128, 256, 512), (1, 2, 2, 2), strict=True):
        for number in range(blocks):
            layers.append(Bottleneck(given, width, stride if number == 0 else 1))
            given = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.answered = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        query, key, value = (
            each.view(shape).transpose(1, 2) for each in self.asked(self.before_attention(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.answered(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Writer(nn.Module):
    """GPT-like: 12 blocks, 30.6M elements."""

    def __init__(self, words: int = 12_000, width: int = 384) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, 6) for _ in range(12)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places.weight
        return self.head(self.last(self.blocks(x)))


class Many(nn.Module):
    """2,000 tensors of 1,000 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1000) * 0.01) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * x).sum() for part in self.parts])


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(_context, gradient):  # type: ignore[no-untyped-def]
        time.sleep(0.005)
        return gradient


def asleep(x: torch.Tensor) -> torch.Tensor:
    """The backward of what follows leaves the processor idle for 5 ms."""
    return _Asleep.apply(x)


class Sleepy(nn.Module):
    """12 gradients of 8 MB; before each the backward leaves the processor idle for 5 ms, as an accelerator would."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(1 << 21)) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = asleep(x + part.sum())
        return x


def mlp() -> nn.Module:
    layers = (nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 16))
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP, 1M": (mlp, lambda: torch.randn(16, 512)),
    "ResNet-50-like": (resnet, lambda: torch.randn(2, 3, 64, 64)),
    "GPT-like, 30M": (Writer, lambda: torch.randint(0, 12_000, (2, 64))),
    "2,000 x 1,000": (Many, lambda: torch.randn(1000)),
    "one of 100M": (lambda: nn.Linear(10_000, 10_000, bias=False), lambda: torch.randn(4, 10_000)),
    "idle backward": (Sleepy, lambda: torch.zeros(1)),
}
