"""Trains a small convolutional network to read noisy digits. This is an ordinary data-parallel PyTorch script.

The script does not depend on its launcher. It reads the usual variables and joins the usual process group. It saves a
checkpoint, so that it can continue after a restart. It draws the digits itself (a dot-matrix font, shifted at random,
with heavy noise), so there is nothing to download.

    ddp-launch --nproc-per-node 2 --max-restarts 3 examples/train_digits.py --checkpoint /tmp/digits.pt
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# A dot-matrix font: one number per row of dots, five dots wide.
FONT = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
SIDE, HEIGHT, WIDTH = 16, 7, 5
NOISE = 0.9


@dataclass
class Digits:
    images: torch.Tensor  # count x 1 x SIDE x SIDE
    labels: torch.Tensor


def draw_digits(count: int, seed: int) -> Digits:
    random = torch.Generator().manual_seed(seed)
    rows = torch.tensor(FONT)
    glyphs = (rows[:, :, None] >> torch.arange(WIDTH - 1, -1, -1) & 1).float()
    labels = torch.randint(10, (count,), generator=random)
    images = torch.randn(count, 1, SIDE, SIDE, generator=random) * NOISE
    down = torch.randint(SIDE - HEIGHT + 1, (count,), generator=random).tolist()
    right = torch.randint(SIDE - WIDTH + 1, (count,), generator=random).tolist()
    for image, label, y, x in zip(images, labels.tolist(), down, right, strict=True):
        image[0, y : y + HEIGHT, x : x + WIDTH] += 2 * glyphs[label]
    return Digits(images, labels)


def reader() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.checkpoint = Path(options.checkpoint)
        self.metrics = options.metrics
        self.epochs = options.epochs
        self.batch = options.batch
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.record("started", pid=os.getpid())
        torch.manual_seed(1)  # the same first weights in every rank
        self.model = DistributedDataParallel(reader())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.04, momentum=0.9)
        self.train, self.test = draw_digits(3072, seed=2), draw_digits(1024, seed=3)
        self.epoch = 0

    def run(self) -> None:
        self.resume()
        while self.epoch < self.epochs:
            loss = self.one_epoch()
            self.epoch += 1
            self.save()
            self.show(loss)

    def one_epoch(self) -> float:
        order = torch.randperm(len(self.train.labels), generator=torch.Generator().manual_seed(self.epoch))
        total = torch.zeros(())
        batches = order[self.rank :: self.world].split(self.batch)
        for number, batch in enumerate(batches, start=1):
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(self.train.images[batch]), self.train.labels[batch])
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
            if number % 16 == 0 and self.rank == 0:
                self.record("batch", epoch=self.epoch + 1, batch=number, loss=loss.item())
        dist.all_reduce(total)
        return total.item() / len(batches) / self.world

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        self.record("resumed", epoch=self.epoch)
        if self.rank == 0:
            print(f"continuing from the checkpoint of epoch {self.epoch}")

    def save(self) -> None:
        if self.rank == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": self.epoch,
            }
            unfinished = self.checkpoint.with_suffix(".new")
            torch.save(state, unfinished)
            unfinished.replace(self.checkpoint)  # a rank may be killed while it writes

    def show(self, loss: float) -> None:
        if self.rank == 0:
            with torch.no_grad():
                right = (self.model.module(self.test.images).argmax(1) == self.test.labels).float().mean()
            done = round(12 * self.epoch / self.epochs)
            bar = "━" * done + "·" * (12 - done)
            print(f"epoch {self.epoch:2d}/{self.epochs} {bar} loss {loss:.3f}  reads {right:6.1%} correctly")
            self.record("epoch", epoch=self.epoch, loss=loss)

    def record(self, what: str, **facts: float) -> None:
        """Append one line of JSON to the metrics."""
        if self.metrics:
            line = json.dumps({"what": what, "rank": self.rank} | facts) + "\n"
            with open(self.metrics, "a") as file:
                file.write(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="digits.pt")
    parser.add_argument("--metrics", default="", help="append lines of JSON here")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    Training(options).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
