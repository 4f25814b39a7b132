"""A loop over Lightning Fabric."""

import lightning
import torch

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(4)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(40, 6))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=5, shuffle=True))
for (x,) in loader:
    loss = model(x).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(fabric.global_rank, f"{loss.item():.7f}")
fabric.save("fabric.ckpt", {"model": model})
