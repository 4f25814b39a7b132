"""Trains the same network as train_digits.py, and keeps its state when ranks are lost.

    .venv/bin/ddp-launch --nproc-per-node 2 --max-restarts 3 examples/train_elastic.py --folder /tmp/digits

It commits every step to memory, and every hundredth step to disk. If you kill a rank, the other ranks keep their
processes, and all continue from their last step.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from train_digits import draw_digits, reader

import ddp
from ddp import elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="digits-commits")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=3072)
    options = parser.parse_args()
    place = ddp.init()
    torch.manual_seed(1)  # the same first weights in every rank
    model = ddp.DistributedDataParallel(reader().to(place.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    digits = draw_digits(options.samples, seed=2)
    dataset = TensorDataset(digits.images, digits.labels)
    sampler = elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, options.batch, sampler=sampler, generator=torch.Generator())
    state = elastic.State(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        step=0,
        total=0.0,
        folder=options.folder,
        disk_every=100,
    )

    def train() -> None:  # is called again after a failure of another rank, and goes on where the state is
        if state.step and place.rank == 0:
            print(f"continuing after step {state.step}")
        for epoch in sampler.epochs(options.epochs):
            for images, labels in loader:
                loss = cross_entropy(model(images.to(place.device)), labels.to(place.device))
                optimizer.zero_grad()
                loss.backward()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                optimizer.step()
                state.step += 1
                state.total += mean.item() / dist.get_world_size()
                state.commit(samples=len(labels))
                if state.should_checkpoint():
                    state.checkpoint()
            if place.rank == 0:
                print(f"epoch {epoch + 1}: mean loss so far {state.total / state.step:.4f}")

    state.run(train)
    state.checkpoint()  # save the final result
    state.close()
    ddp.shutdown()


if __name__ == "__main__":
    main()
