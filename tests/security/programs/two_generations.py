"""Ranks that meet, say where, and fail once when they are told to."""

import os
import sys
import time

import torch
import torch.distributed as dist

there, generation = os.environ["THERE"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = dist.get_rank()


def say(name: str, text: str = "") -> None:
    with open(f"{there}/{name}.part", "w") as file:
        file.write(text)
    os.rename(f"{there}/{name}.part", f"{there}/{name}")


if rank == 0:
    say(f"store-{generation}", f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    say(f"trains-{generation}")
wanted = "fail" if generation == 1 else "end"
while not os.path.exists(f"{there}/{wanted}"):
    time.sleep(0.02)
if wanted == "fail" and rank == 0:
    sys.exit(7)
dist.barrier()
dist.destroy_process_group()
