"""FSDP2 with a checkpoint of torch.distributed.checkpoint, which is read again."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(4):
    torch.manual_seed(step * 2 + dist.get_rank())
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(dist.get_rank(), step, f"{loss.item():.7f}")
state = get_model_state_dict(model)
dcp.save(state, checkpoint_id="sharded")
with torch.no_grad():
    for each in model.parameters():
        each.zero_()
state = get_model_state_dict(model)
dcp.load(state, checkpoint_id="sharded")
set_model_state_dict(model, state)
print(dist.get_rank(), f"{model(torch.ones(1, 8)).sum().item():.7f}")
dist.destroy_process_group()
