"""accelerate: 3 epochs of 12 batches for each of 2 ranks, shuffled, with dropout, a scheduler and an accumulation."""

import accelerate
import torch
from accelerate import Accelerator
from kills import PLAN, begin_batch, begin_step, data, end, net, say
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
leaves_after = PLAN.get("leaves_after")
for _call in range(PLAN.get("calls", 1)):
    for epoch, batches in kept.over(loader, 3):
        model.train()
        for inputs, targets in batches:
            step, batch = kept.steps, kept.batches
            begin_step(step)
            begin_batch()
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if leaves_after is None:
                    kept.step_complete()
                    mean = accelerator.gather(loss.detach()).mean()
                    accelerator.log({"loss": mean.item()}, step=kept.steps)
                say(what="loss", step=step, loss=loss.item())
            if batch == leaves_after and epoch != 1:
                break
        begin_step(f"evaluation {epoch}")
        model.eval()
        with torch.no_grad():  # else DDP averages the gradients of the next batch alone
            model(torch.ones(4, 8))  # not `inputs`: after a restart this epoch may have no batch left
end(accelerator.unwrap_model(model))
