"""Meets in every way that scripts do, one after the other. Arguments: the ways, in order."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
wait = timedelta(seconds=120)


def exchanged(store, key):
    store.set(f"{key}/{rank}", f"from {rank}")
    return [store.get(f"{key}/{peer}").decode() for peer in range(world_size)]


def checked_group(how, **options):
    dist.init_process_group("gloo", timeout=wait, **options)
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    assert ranks.item() == sum(range(world_size))
    dist.barrier()
    dist.destroy_process_group()


def positional():
    store = dist.TCPStore(host, port, world_size, rank == 0, wait)
    assert exchanged(store, "positional") == [f"from {peer}" for peer in range(world_size)]
    return store


def keyword():
    store = dist.TCPStore(
        host_name=host, port=port, world_size=world_size, is_master=(rank == 0), timeout=wait
    )
    assert len(exchanged(store, "keyword")) == world_size
    return store


def without_waiting():
    store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=wait)
    assert len(exchanged(store, "without")) == world_size
    return store


def as_store():
    store = positional()
    checked_group("store", store=dist.PrefixStore("mine", store), rank=rank, world_size=world_size)
    return store


def env():
    checked_group("env", init_method="env://")


def tcp():
    checked_group("tcp", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size)


def file():
    path = os.environ["STORE_FILE"]
    checked_group("file", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)


def elsewhere():
    """A store at a port of the script's own choice stays the script's own."""
    if rank == 0:
        own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        dist.TCPStore(host, port, is_master=False, timeout=wait).set("elsewhere", str(own.port))
        assert own.port != port
        own.wait(["done"], wait)
        return
    theirs = int(dist.TCPStore(host, port, is_master=False, timeout=wait).get("elsewhere"))
    dist.TCPStore(host, theirs, is_master=False, timeout=wait).set("done", "1")


for way in sys.argv[1:]:
    met = globals()[way]()
    print(f"{way} met {rank}", flush=True)
    if way == sys.argv[-1] and met is not None:
        # Rank 0 must not take its store away while the other still reads from it.
        met.set(f"leaving/{rank}", "")
        if rank == 0:
            met.wait([f"leaving/{peer}" for peer in range(world_size)], wait)
