"""Trains a small language model with parameters sharded over the ranks (FSDP2). It survives the loss of a rank.

    .venv/bin/ddp-launch --nproc-per-node 2 --max-restarts 3 examples/train_fsdp2.py --folder /tmp/fsdp2

Each rank commits its own shards: to memory at every step, and to disk at every 20th. If a rank is lost, the other ranks
keep their processes, and all go back to the last commit. In a world of another size the shards are redistributed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import ddp
from ddp import elastic

TEXT = b"the quick brown fox jumps over the lazy dog and runs away from the slow grey bear; " * 160
LENGTH = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=hidden, need_weights=False)[0]
        return x + self.mix(x)


class Writer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letters(text) + self.places
        for block in self.blocks:
            x = block(x)
        return self.out(x.flatten(0, 1))


def sharded(model: Writer) -> Writer:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="fsdp2-commits")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    place = ddp.init()
    torch.manual_seed(1)  # the same first weights in every rank
    model = sharded(Writer().to(place.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long().to(place.device)
    lines = text[: len(text) - len(text) % (LENGTH + 1)].view(-1, LENGTH + 1)
    sampler = elastic.ElasticSampler(len(lines))
    state = elastic.State(
        model=model, optimizer=optimizer, sampler=sampler, step=0, folder=options.folder, disk_every=20
    )

    def train() -> None:  # is called again after a failure of another rank, and goes on where the state is
        if state.step and place.rank == 0:
            print(f"continuing after step {state.step}")
        loss = torch.zeros((), device=place.device)
        for epoch in sampler.epochs(options.epochs):
            for chosen in torch.utils.data.BatchSampler(sampler, options.batch, drop_last=False):
                batch = lines[chosen]
                loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.step += 1
                state.commit(samples=len(chosen))
            total = loss.detach().clone()
            dist.all_reduce(total)
            if place.rank == 0:
                print(f"epoch {epoch + 1}: {state.step} steps, loss {total.item() / place.world_size:.4f}")

    state.run(train)
    state.checkpoint()
    state.close()
    ddp.shutdown()


if __name__ == "__main__":
    main()
