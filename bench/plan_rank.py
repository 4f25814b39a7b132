"""One rank of bench/plan.py: trains a model of bench/ddp_models with our DDP, or times all-reduces.

Under `ddp-launch` (for the profile), the rank trains until it is ended. In a host of the bench, it writes its figures.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(_HERE), os.path.join(_HERE, "ddp_models")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import MODELS  # noqa: E402

import ddp.shm  # noqa: E402
from ddp import DistributedDataParallel  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP = 3
_AT_LEAST = 3
_LONG_S = 10.0


def steps(model_name: str, backend: str, are_enough: Callable[[list[float]], bool]) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(MODELS[model_name][0](), process_group=dist.new_group(backend=backend))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = MODELS[model_name][1]()
    taken: list[float] = []
    while not are_enough(taken):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return taken[_WARM_UP:]


def are_enough(count: int, taken: list[float]) -> bool:
    """Whether `count` steps were done, or fewer that took long. Rank 0 decides for all."""
    if len(taken) < _WARM_UP + _AT_LEAST:
        return False
    enough = torch.tensor([len(taken) == count or sum(taken) > _LONG_S])
    dist.broadcast(enough, 0)
    return bool(enough)


def all_reduces(size: int, backend: str, count: int) -> list[float]:
    group = dist.new_group(backend=backend)
    tensor, taken = torch.zeros(size // 4), []
    for _ in range(count + 1):
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        taken.append(time.perf_counter() - began)
    return taken[1:]


def main() -> None:
    torch.set_num_threads(1)
    assert ddp.shm.register(), "the compiled core is not there"
    if sys.argv[1] == "--profile":
        dist.init_process_group("gloo")
        steps(sys.argv[2], "shm" if dist.get_world_size() > 1 else "gloo", lambda _taken: False)
        return
    folder = sys.argv[1]
    with open(os.path.join(folder, "trial.json")) as file:
        trial: dict[str, Any] = json.load(file)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.join(folder, "store"), world), rank=rank, world_size=world
    )
    found = {}
    enough = partial(are_enough, trial.get("steps", 0))
    for backend in trial["backends"]:
        for name in trial["models"]:
            found[f"{backend}/{name}"] = statistics.median(steps(name, backend, enough))
        for size in trial["sizes"]:
            found[f"{backend}/{size}"] = statistics.median(all_reduces(size, backend, trial["repeats"]))
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, found)
    if rank == 0:
        with open(os.path.join(folder, "taken.json"), "w") as file:
            json.dump({key: max(row[key] for row in rows) for key in found}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
