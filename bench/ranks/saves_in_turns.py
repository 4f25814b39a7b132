"""A rank of bench/checkpoints.py: all that can save a state save and restore the same one, in turns.

The arguments: gigabytes of the state, its sharding, rounds, a folder on disk, one in memory, a file for the figures.
A small state comes first, so that everybody has imported and connected what it needs.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # before bench/ddp.py, which is not the package

from savers import Figures, Subject, installed

import ddp

if TYPE_CHECKING:
    from savers import Saver

WIDTH = 1024
LAYER_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # the parameters, and two tensors of Adam
WARM_UP_GB = 0.02


def subject(gigabytes: float, sharding: str) -> Subject:
    torch.manual_seed(0)  # a resume gives each rank other random numbers
    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    world = dist.get_world_size()
    if sharding != "replicated":
        shape, names = (
            ((world,), ("shards",)) if sharding == "FSDP2" else ((2, world // 2), ("copies", "shards"))
        )
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return Subject(model, optimizer, sharding == "replicated")


def turn(saver: Saver, of: Subject) -> Figures:
    saver.open()
    found = saver.save()
    of.forget()
    found |= saver.resume()
    of.check()
    saver.close()
    return found


def main() -> None:
    gigabytes, sharding, rounds, disk, memory, out = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    place = ddp.init("gloo")
    folders = Path(disk), Path(memory)
    small = subject(WARM_UP_GB, sharding)
    for saver in installed(small, *folders).values():
        turn(saver, small)
    whole = subject(float(gigabytes), sharding)
    savers = installed(whole, *folders)
    figures: dict[str, list[Figures]] = {name: [] for name in savers}
    for number in range(int(rounds)):
        order = list(savers) if number % 2 == 0 else list(reversed(savers))
        for name in order:
            figures[name].append(turn(savers[name], whole))
            if place.rank == 0:
                told = ", ".join(f"{what} {value:,.0f} ms" for what, value in figures[name][-1].items())
                print(f"{gigabytes} GB, {sharding}: {name}: {told}", file=sys.stderr, flush=True)
    if place.rank == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    ddp.shutdown()


if __name__ == "__main__":
    main()
