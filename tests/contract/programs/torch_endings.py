"""Ends in the way that $ENDING names, with torch at work."""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def process_group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))


def group_left_open():
    process_group()
    sys.exit(7)


def group_destroyed():
    process_group()
    dist.destroy_process_group()


def group_in_a_global_and_failure():
    global model
    process_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(2, 1)).sum().backward()
    raise ValueError("bad batch")


def loader_left_running():
    global batches
    batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True))
    next(batches)
    sys.exit(7)


def intra_op_threads():
    torch.set_num_threads(2)
    global product
    product = torch.ones(256, 256) @ torch.ones(256, 256)
    sys.exit(7)


def autograd_and_a_computing_thread():
    computing = threading.Thread(target=lambda: [torch.ones(64, 64) @ torch.ones(64, 64) for _ in range(100)])
    computing.start()
    weight = torch.ones(4, requires_grad=True)
    (weight * 2).sum().backward()
    sys.exit(7)


def own_store_left_open():
    global store
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    sys.exit(7)


if __name__ == "__main__":
    globals()[os.environ["ENDING"]]()
