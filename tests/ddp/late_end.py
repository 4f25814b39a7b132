"""A work that nobody waits for is done at the worst of moments: its thread wants the GIL when the interpreter ends."""

import atexit
import ctypes
import os
import sys
import time


def run(folder: str, rank: int, port: str) -> None:
    ending = os.path.join(folder, "ending")
    if rank == 0:
        # Registered before torch is there, so it is the last that runs, and it keeps the GIL.
        atexit.register(ctypes.PyDLL(None).usleep, 500_000)
    import torch
    import torch.distributed as dist

    import ddp

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ddp.init("gloo", device="cpu")
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        atexit.register(os.mkdir, ending)
        sys.exit(3)
    while not os.path.exists(ending):
        time.sleep(0.01)
    dist.all_reduce(torch.ones(3))
    os._exit(0)


run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
