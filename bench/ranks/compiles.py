"""Trains a compiled model until the file `stop` is in its folder; each rank writes what it does, as JSON lines.

compiles.py mlp|gpt [LAYERS]
"""

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["COMPILES"])
RANK = int(os.environ["RANK"])


def tell(event: str, **more: object) -> None:
    ours = {"rank": RANK, "pid": os.getpid(), "node": os.environ.get("NODE", ""), "at": time.time()}
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    line = json.dumps({"event": event, "attempt": attempt, **ours, **more})
    with (FOLDER / f"told-{RANK}").open("a") as file:
        file.write(line + "\n")


tell("line")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.manual_seed(1)
if sys.argv[1] == "gpt":
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    net: torch.nn.Module = torch.nn.TransformerEncoder(layer, int(sys.argv[2]), enable_nested_tensor=False)
    inputs = torch.randn(4, 32, 64)
else:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    inputs = torch.randn(4, 16)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.compile(net))  # around it: torch's DDP breaks graphs
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
steps = 0
stop = torch.zeros(1)
while not stop:
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    steps += 1
    if steps == 1:
        from torch._dynamo.utils import counters

        told = {name: dict(counters[name]) for name in ("inductor", "aot_autograd")}
        tell("stepped", scratch=os.environ.get("DDP_SCRATCH", ""), loss=loss.item(), counters=told)
    time.sleep(0.05)
    stop.fill_((FOLDER / "stop").exists())
    dist.all_reduce(stop)
tell("end", loss=loss.item(), steps=steps)
dist.destroy_process_group()
