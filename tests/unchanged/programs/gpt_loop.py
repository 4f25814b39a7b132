"""A loop of the shape that small GPT repositories have: accumulation, a cosine, clipping."""

import math
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337 + rank)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = torch.nn.Sequential(torch.nn.Embedding(32, 16), layer, torch.nn.Linear(16, 32))
model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
for step in range(5):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 5))
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        x = torch.randint(0, 32, (4, 9))
        loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) / 2
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(rank, step, f"{loss.item():.7f} {norm.item():.6f}")
if rank == 0:
    torch.save(model.module.state_dict(), "ckpt.pt")
    print(sorted(torch.load("ckpt.pt"))[:2], os.path.exists("ckpt.pt"))
dist.destroy_process_group()
