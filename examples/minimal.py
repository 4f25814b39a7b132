"""The smallest data-parallel script. Run it with `ddp-launch --nproc-per-node 2 examples/minimal.py`."""

from __future__ import annotations

import torch
from torch import nn

import ddp


def main() -> None:
    place = ddp.init()
    torch.manual_seed(0)
    model = ddp.DistributedDataParallel(nn.Linear(4, 1).to(place.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.tensor([[1.0], [-2.0], [3.0], [0.5]], device=place.device)
    torch.manual_seed(1 + place.rank)  # each rank has its own samples
    loss = torch.zeros(())
    for _ in range(200):
        samples = torch.randn(32, 4, device=place.device)
        loss = nn.functional.mse_loss(model(samples), samples @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if place.rank == 0:
        print(f"world size {place.world_size}, loss {loss.item():.6f}")
    ddp.shutdown()


if __name__ == "__main__":
    main()
