"""accelerate: 3 epochs of 12 batches for each of 2 ranks, shuffled, with dropout, a scheduler and an accumulation."""

import accelerate
import torch
from accelerate import Accelerator
from kills import PLAN, begin_step, data, end, net, say
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import ddp

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PLAN.get("accumulate", 1))
accelerate.utils.set_seed(7)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
loader = DataLoader(data(), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
kept = ddp.integrations.attach(accelerator, PLAN.get("folder"))
for _epoch, batches in kept.over(loader, 3):
    for inputs, targets in batches:
        begin_step(kept.steps)
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            kept.step_complete()
            say(what="loss", step=kept.steps - 1, loss=loss.item())
            mean = accelerator.gather(loss.detach()).mean()
            accelerator.log({"loss": mean.item()}, step=kept.steps)
end(accelerator.unwrap_model(model))
