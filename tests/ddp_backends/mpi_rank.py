"""What a rank does that mpirun has started: it says what it saw."""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist

import ddp

warnings.filterwarnings("ignore", message=".*deprecated.*", category=FutureWarning)


def place(backend):
    """Who MPI says we are, and that the group works."""
    here = ddp.init(backend)
    total = torch.full((3,), float(here.rank + 1))
    dist.all_reduce(total)
    said = [here.rank, here.world_size, here.local_rank, here.local_world_size, here.node_rank, here.backend]
    return [*said, total.tolist()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, *more = sys.argv[1:]
    answer = globals()[what](*more)
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        json.dump(answer, file)
    ddp.shutdown()
