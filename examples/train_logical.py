"""Trains the network of train_digits.py with the same bits in a world of any size, and prints their SHA-256 sum.

    .venv/bin/ddp-launch --nproc-per-node 4 --logical-world 4 examples/train_logical.py
    .venv/bin/ddp-launch --nproc-per-node 1 --logical-world 4 examples/train_logical.py

Both print the same sum. So does a job that is stopped and goes on with another number of processes (--folder).
"""

from __future__ import annotations

import argparse
import hashlib
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from train_digits import draw_digits, reader

import ddp
from ddp import elastic


def sum_of_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    for state in optimizer.state.values():
        found.update(state["momentum_buffer"].cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="where commits are kept; without it a stopped job begins again")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this number of steps")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--samples", type=int, default=1024)
    options = parser.parse_args()
    place = ddp.init()
    torch.manual_seed(1)
    random.seed(1)
    world = elastic.LogicalWorld()  # of --logical-world
    model = ddp.DistributedDataParallel(nn.Sequential(nn.Dropout(0.1), reader()).to(place.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    digits = draw_digits(options.samples, seed=2)
    dataset = TensorDataset(digits.images, digits.labels)
    sampler = elastic.ElasticSampler(dataset, logical_world=world)
    loader = DataLoader(dataset, batch_sampler=sampler.batches(options.batch))
    kept = {"world": world, "model": model, "optimizer": optimizer, "sampler": sampler}
    state = elastic.State(**kept, step=0, folder=options.folder)

    def train() -> None:
        for _epoch in sampler.epochs(options.epochs):
            for step in world.steps(loader, model):
                optimizer.zero_grad()
                losses = []
                for images, labels in step:
                    images = images.roll(random.choice((-1, 0, 1)), dims=3)  # numbers of the logical rank
                    loss = cross_entropy(model(images.to(place.device)), labels.to(place.device))
                    loss.backward()
                    losses.append(loss)
                optimizer.step()
                state.step += 1
                mean = world.mean(losses)
                state.commit(samples=len(labels))
                if place.rank == 0 and state.step % 8 == 0:
                    print(f"step {state.step}: mean loss {mean.item():.4f}")
                if state.step == options.steps:
                    return

    state.run(train)
    if options.folder:
        state.checkpoint()
    if place.rank == 0:
        print(f"step {state.step}: SHA-256 {sum_of_bits(model.module, optimizer)}")
    state.close()
    ddp.shutdown()


if __name__ == "__main__":
    main()
