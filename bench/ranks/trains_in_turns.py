"""A rank of bench/overhead.py: trains as many steps as it reads from its pipe; none means the end.

trains_in_turns.py FOLDER MODEL KIND on|off
"""

from __future__ import annotations

import os
import sys
import time

FOLDER, MODEL, KIND, WATCHED = sys.argv[1:]
if WATCHED == "off":
    # There is no option that would keep page and guard from a rank; without these it has none.
    for name in ("DDP_STATUS_PAGE", "DDP_GUARD"):
        os.environ.pop(name, None)
BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(BENCH, "ddp_models"), os.path.dirname(BENCH)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import MODELS  # noqa: E402


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    if KIND == "torch DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    from ddp import DistributedDataParallel

    return DistributedDataParallel(model)


def main() -> None:
    torch.set_num_threads(1)
    if KIND.endswith("shm"):
        import ddp.shm

        assert ddp.shm.register(), "the compiled core is not there"
    dist.init_process_group("shm" if KIND.endswith("shm") else "gloo")
    torch.manual_seed(0)
    make, batch = MODELS[MODEL]
    model, inputs = wrapped(make()), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with (
        open(os.path.join(FOLDER, f"turn-{dist.get_rank()}")) as turns,
        open(os.path.join(FOLDER, "took"), "w", buffering=1) as took,
    ):
        while steps := int(turns.readline()):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            dist.barrier()
            if dist.get_rank() == 0:
                took.write(f"{time.perf_counter() - began}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
