"""Trains a model with DDP and AdamW; before the loss the last rank kills itself after a step, when it is told.

trains_once.py [mlp|gpt] [torch|ours] [compile]

Launchers of several nodes count restarts differently, so a mark in the benchmark's folder says if this is
after the loss.
"""

import os

LOST = os.path.join(os.path.dirname(os.environ["BENCH_STAMPS"]), "lost")
AFTER = os.path.exists(LOST)
os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(AFTER))

from stamp import stamp, wait_at_gate  # noqa: E402

stamp("line")

import signal  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from networks import network  # noqa: E402

net, inputs = network("gpt" if "gpt" in sys.argv else "mlp")
if "ours" in sys.argv:
    os.environ.setdefault("DDP_BACKEND", "gloo")
    import ddp

    ddp.init()
    model: torch.nn.Module = ddp.DistributedDataParallel(net)
else:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
forward = torch.compile(model) if "compile" in sys.argv else model
optimizer = torch.optim.AdamW(model.parameters())


def step() -> None:
    optimizer.zero_grad()
    forward(inputs).sum().backward()
    optimizer.step()


step()
stamp("stepped")
if not AFTER:
    if dist.get_rank() == dist.get_world_size() - 1:
        wait_at_gate()
        with open(LOST, "w"):
            pass
        stamp("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    step()
if "ours" in sys.argv:
    ddp.shutdown()
else:
    dist.destroy_process_group()
