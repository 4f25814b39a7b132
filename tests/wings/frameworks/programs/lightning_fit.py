"""Lightning: 3 epochs of 12 batches for each of 2 ranks, shuffled, with dropout, a scheduler and a validation."""

import importlib

import torch
from kills import PLAN, begin_batch, begin_step, data, end, net, say
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import ddp

pl = importlib.import_module(PLAN.get("package", "lightning.pytorch"))


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        if index % PLAN.get("accumulate", 1) == 0:
            begin_step(self.global_step)
        begin_batch()
        loss = mse_loss(self.net(batch[0]), batch[1])
        say(what="loss", step=self.trainer.fit_loop.total_batch_idx, loss=loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _index):
        self.log("of_validation", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


pl.seed_everything(7, verbose=False)
model = Regression()
workers = {"num_workers": PLAN.get("workers", 0)}
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    default_root_dir=".",
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=PLAN.get("sanity", 0),
    accumulate_grad_batches=PLAN.get("accumulate", 1),
    val_check_interval=PLAN.get("validate_every", 1.0),
    callbacks=[ddp.integrations.LightningCallback(PLAN.get("folder"))],
)
trainer.fit(
    model, DataLoader(data(), batch_size=4, shuffle=True, **workers), DataLoader(data(16), batch_size=4)
)
end(model.net)
