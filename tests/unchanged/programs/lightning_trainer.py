"""Lightning's Trainer with a bar and a checkpoint."""

import os

import lightning as pl
import torch


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.losses = torch.nn.Linear(4, 1), []

    def training_step(self, batch, index):
        (inputs,) = batch
        loss = (self.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.losses.append(round(loss.item(), 6))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


pl.seed_everything(5)
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=4, shuffle=True)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, default_root_dir=os.getcwd()
)
model = Line()
trainer.fit(model, loader)
print(
    trainer.global_rank, trainer.world_size, model.losses, trainer.checkpoint_callback.best_model_path != ""
)
