"""Scalars of tensorboard, written by rank 0 and read again."""

import os

import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with SummaryWriter("runs") as writer:
        for step in range(5):
            writer.add_scalar("loss", 1 / (step + 1), step)
    read = EventAccumulator("runs").Reload()
    print([(each.step, round(each.value, 6)) for each in read.Scalars("loss")], len(os.listdir("runs")))
dist.barrier()
dist.destroy_process_group()
