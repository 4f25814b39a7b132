"""A script for Hugging Face accelerate, without `accelerate launch`. With `attach`, a failure costs no finished step.

ddp-launch --nproc-per-node 2 --max-restarts 3 examples/train_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp


def main() -> None:
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)
    samples = torch.randn(512, 8)
    data = TensorDataset(samples, samples.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=32, shuffle=True)
    )
    kept = ddp.integrations.attach(accelerator)
    loss = torch.zeros(())
    for _epoch, batches in kept.over(loader, 10):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print(f"world size {accelerator.num_processes}, loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
