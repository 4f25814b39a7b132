"""Trains a small model with torch's DDP and AdamW; in the first attempt the last rank kills itself after a step."""

from stamp import stamp, wait_at_gate

stamp("line")

import os  # noqa: E402
import signal  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
layers = [torch.nn.Linear(256, 256) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 256)).sum().backward()
    optimizer.step()


step()
stamp("stepped")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == dist.get_world_size() - 1:
        wait_at_gate()
        stamp("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    step()
dist.destroy_process_group()
