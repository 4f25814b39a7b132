"""A script for Lightning. With the callback, a failure costs no finished step.

ddp-launch --nproc-per-node 2 --max-restarts 3 examples/train_lightning.py
"""

from __future__ import annotations

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    samples = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(samples, samples.sum(dim=1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=5,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ddp.integrations.LightningCallback()],
    )
    trainer.fit(Regression(), loader)
    if trainer.is_global_zero:
        print(f"world size {trainer.world_size}, steps {trainer.global_step}")


if __name__ == "__main__":
    main()
