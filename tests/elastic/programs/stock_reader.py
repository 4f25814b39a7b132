"""Reads a checkpoint with torch alone, as another program would: argv is the folder, and then the world sizes to try.

Prints one line of JSON for each: the digest of parameters and optimizer, and the values that were read.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")


def network():
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(13), nn.Linear(13, 1))


def sharded(kind, world):
    model = network()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model) if world > 1 else model
    shape = (world,) if kind == "fsdp2" else (world // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp",) if len(shape) == 1 else ("copies", "shards"))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def digest(model, optimizer):
    """As programs/training.py has it."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def read(folder, kind, world):
    model = sharded(kind, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    found = {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
        "scheduler": {"last_epoch": 0},
        "losses": [],
    }
    dcp.load(found, checkpoint_id=folder)
    states.set_model_state_dict(model, found["model"])
    states.set_optimizer_state_dict(model, optimizer, found["optimizer"])
    same = digest(model, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    told = {"kind": kind, "world": world, "digest": same, "lr": lr, "losses": found["losses"]}
    return told | {"last_epoch": found["scheduler"]["last_epoch"]}


def rank_of(folder, kind, world, rank, meeting):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=world)
    told = read(folder, kind, world)
    dist.barrier()
    if rank == 0:
        assert not any(name.partition(".")[0] == "ddp" for name in sys.modules)
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def main():
    """All ranks are forked from this process, which only imports torch."""
    folder, *wanted = sys.argv[1:]
    for each in wanted:
        kind, world = each.split(":")
        with tempfile.TemporaryDirectory() as meeting:
            arguments = [(folder, kind, int(world), rank, meeting) for rank in range(int(world))]
            ranks = [FORK.Process(target=rank_of, args=words) for words in arguments]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            assert not any(rank.exitcode for rank in ranks)


FORK = multiprocessing.get_context("fork")
main()
