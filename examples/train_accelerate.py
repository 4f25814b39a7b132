"""An ordinary script for Hugging Face accelerate. It does not know of ddp-launch, and needs no `accelerate launch`.

ddp-launch --nproc-per-node 2 examples/train_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    loss = torch.zeros(())
    for _ in range(10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print(f"world size {accelerator.num_processes}, loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
