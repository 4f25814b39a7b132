"""Lightning when a scheduler stops the job: the launcher gets SIGTERM in the middle of training.

Which rank sees it first, and which one sees only that its peer is gone, differs from run to run.
"""

import os
import signal

import lightning as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if self.global_step == 3 and self.global_rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.utils.data.TensorDataset(torch.ones(400_000, 4))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint("saved")],
)
trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=4))
print("not reached")
