"""A rank of the parts `launch`, `first-step` and `restart`, under either launcher. It tells when it has come how far.

first_step.py context        a context on the card, and no more
first_step.py step           a process group, a model, one training step
first_step.py dies           the same; then the last rank kills itself, once, while the others wait for it
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, os.path.join(_ROOT, "bench", "ranks"))

from stamp import stamp, wait_at_gate  # noqa: E402

stamp("line")

import signal  # noqa: E402

import rank  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def train_a_step(where: torch.device) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 16)).to(where)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    wrapped(torch.randn(16, 512, device=where)).square().mean().backward()
    optimizer.step()
    rank.synchronize()


def main() -> None:
    stamp("torch")
    how = sys.argv[1]
    if how == "context":
        torch.ones(1, device=rank.device()).tolist()
        stamp("context")
        return
    where = rank.join()
    told = torch.ones(1, device=where)
    dist.all_reduce(told)
    told.tolist()
    stamp("reduced")
    train_a_step(where)
    stamp("step")
    if how == "dies" and IS_FIRST:
        if rank.RANK == rank.RANKS - 1:
            wait_at_gate()
            stamp("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(told)
        told.tolist()
        wait_at_gate()  # for good: the launcher ends this rank, whose peer is gone
    rank.leave()


main()
