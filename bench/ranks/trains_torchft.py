"""One replica of torchft trains on; before the loss the last one kills itself when it is told.

trains_torchft.py mlp|gpt torch [compile], with REPLICA and REPLICAS in the environment
"""

import os

LOST = os.path.join(os.path.dirname(os.environ["BENCH_STAMPS"]), "lost")
AFTER = os.path.exists(LOST)
os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(AFTER))

import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torchft  # noqa: E402
from networks import network  # noqa: E402
from stamp import stamp, wait_at_gate  # noqa: E402

REPLICA, REPLICAS = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])


def die_when_told() -> None:
    wait_at_gate()
    with open(LOST, "w"):
        pass
    stamp("kill")
    os.kill(os.getpid(), signal.SIGKILL)


def load(state: dict[str, Any]) -> None:
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


net, inputs = network("gpt" if "gpt" in sys.argv else "mlp")
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
    replica_id=f"replica_{REPLICA}",
    hostname="localhost",  # its default is this host's name, which not every machine can look up
)
model = torchft.DistributedDataParallel(manager, net)
forward = torch.compile(model) if "compile" in sys.argv else model
optimizer = torchft.Optimizer(manager, torch.optim.AdamW(net.parameters()))
if REPLICA == REPLICAS - 1 and not AFTER:
    threading.Thread(target=die_when_told, daemon=True).start()
told = False
while True:
    before = manager.current_step()
    optimizer.zero_grad()
    forward(inputs).sum().backward()
    optimizer.step()
    together = manager.is_participating() and manager.num_participants() == REPLICAS
    if together and manager.current_step() > before and not told:
        stamp("stepped")
        told = True
