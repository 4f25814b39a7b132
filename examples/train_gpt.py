"""A small GPT that learns generated text: sums such as `17+25=42;`. It needs no data set and no download.

ddp-launch --nproc-per-node 2 examples/train_gpt.py --steps 300
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn
from torch.nn import functional

import ddp

ALPHABET = "0123456789+=;"
CONTEXT = 64


def text(generator: random.Random, length: int) -> str:
    """As many sums as fit, one after the other."""
    made = ""
    while len(made) < length:
        a, b = generator.randrange(10), generator.randrange(10)
        made += f"{a}+{b}={a + b};"
    return made[:length]


def batch(generator: random.Random, size: int, device: torch.device) -> torch.Tensor:
    rows = [[ALPHABET.index(each) for each in text(generator, CONTEXT + 1)] for _ in range(size)]
    return torch.tensor(rows, device=device)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        qkv = self.to_qkv(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(ALPHABET), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="rows per rank")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()

    place = ddp.init()
    torch.manual_seed(0)
    model = ddp.DistributedDataParallel(GPT(options.width, options.depth, heads=4).to(place.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = random.Random(place.rank)  # each rank has its own text
    for step in range(options.steps):
        loss = loss_of(model, batch(samples, options.batch, place.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ddp.status(f"loss {loss.item():.3f}", step=step + 1, total=options.steps)
        if place.rank == 0 and (step % 50 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    ddp.shutdown()


if __name__ == "__main__":
    main()
