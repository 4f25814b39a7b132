"""A rank of the part `watched`: trains as many steps as it reads from its pipe; none means the end.

    watched.py FOLDER REPEATS on|off

A step is a chain of matrix products, REPEATS times, so that both jobs do exactly the same.
"""

from __future__ import annotations

import os
import sys
import time

FOLDER, REPEATS, WATCHED = sys.argv[1:]
if WATCHED == "off":
    # There is no option that would keep page and guard from a rank; without these it has none.
    for name in ("DDP_STATUS_PAGE", "DDP_GUARD"):
        os.environ.pop(name, None)

import rank  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from watched_model import Chain  # noqa: E402

from ddp import DistributedDataParallel  # noqa: E402


def main() -> None:
    where = rank.join()
    torch.manual_seed(0)
    model = DistributedDataParallel(Chain(int(REPEATS)).to(where))
    inputs = Chain.inputs(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with (
        open(os.path.join(FOLDER, f"turn-{rank.RANK}")) as turns,
        open(os.path.join(FOLDER, "took"), "w", buffering=1) as took,
    ):
        while steps := int(turns.readline()):
            dist.barrier()
            rank.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                rank.synchronize()
            dist.barrier()
            if rank.RANK == 0:
                took.write(f"{time.perf_counter() - began}\n")
    rank.leave()


if __name__ == "__main__":
    main()
