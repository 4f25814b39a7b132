"""Commits of ddp.elastic beside torch.distributed.checkpoint (DCP): stall, time to durable, time to resume.

    .venv/bin/python bench/checkpoints.py [--gb 0.1 1] [--rounds N]
    .venv/bin/ddp-launch --nproc-per-node 2 bench/checkpoints.py --sharding fsdp2

Rounds of both alternate, in the same processes, with the same model and Adam. The stall is the time that the training
thread spends in the call; durable is when it returns from waiting, with all files synced. The page cache is warm. The
figures are medians of rank 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states

# Beside this file lies a ddp.py, which is not the package.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ddp
from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 1024
LAYER_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # the parameters, and two tensors of Adam


def subject(gigabytes: float, sharding: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(gigabytes * 1e9 / LAYER_BYTES))))
    )
    if sharding == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    if dist.get_world_size() > 1:
        dist.barrier()
    begin = time.perf_counter()
    result = action()
    return (time.perf_counter() - begin) * 1e3, result


class Ours:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._named = {"model": model, "optimizer": optimizer, "step": 0}
        self._folder = folder
        self._state = self._new()
        self._state.resume()
        for _slot in range(3):  # the first commit into each slot asks the kernel for its memory
            self.save()

    def _new(self) -> elastic.State:
        return elastic.State(**self._named, folder=self._folder, disk_every=1, keep=1)

    def save(self) -> dict[str, float]:
        stall, _nothing = timed(self._state.commit)
        rest, _nothing = timed(self._state.flush)
        return {"stall": stall, "durable": stall + rest}

    def resume(self) -> dict[str, float]:
        """From memory, as after a restart of the ranks; then from disk alone."""
        keeper = self._state._keeper
        self._state._keeper = None
        self._state._forget_leaving()
        self._state = self._new()
        memory, found = timed(self._state.resume)
        assert found.in_memory
        assert keeper is not None
        self._state.close()  # removes the memory
        self._state = self._new()
        disk, found = timed(self._state.resume)
        assert not found.in_memory
        for _slot in range(3):
            self.save()
        return {"resume from memory": memory, "resume from disk": disk}

    def close(self) -> None:
        self._state.close()


class Dcp:
    """As its tutorial has it. Its cache of the copy in memory needs an accelerator."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._model, self._optimizer, self._folder = model, optimizer, folder
        self._group = dist.new_group(backend="gloo")  # its thread uses it while the ranks use another one
        self._writer = dcp.FileSystemWriter(folder, cache_staged_state_dict=torch.accelerator.is_available())
        self.save()

    def _dictionaries(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "step": 0}

    def save(self) -> dict[str, float]:
        stall, future = timed(self._begin)
        rest, _nothing = timed(future.result)
        return {"stall": stall, "durable": stall + rest}

    def _begin(self) -> Any:
        return dcp.async_save(self._dictionaries(), storage_writer=self._writer, process_group=self._group)

    def resume(self) -> dict[str, float]:
        def load() -> None:
            found = self._dictionaries()
            dcp.load(found, checkpoint_id=self._folder)
            states.set_state_dict(
                self._model,
                self._optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optimizer"],
            )

        return {"resume from disk": timed(load)[0]}

    def close(self) -> None:
        """Nothing is left open."""


def measured(gigabytes: float, sharding: str, rounds: int, folder: Path) -> list[str]:
    model, optimizer = subject(gigabytes, sharding)
    contestants: dict[str, Ours | Dcp] = {
        "ddp.elastic": Ours(model, optimizer, folder / "ours"),
        "DCP async_save": Dcp(model, optimizer, folder / "dcp"),
    }
    times: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    for _round in range(rounds):
        for name, each in contestants.items():
            for what, value in (each.save() | each.resume()).items():
                times[name].setdefault(what, []).append(value)
    rows = []
    for name, each in contestants.items():
        each.close()
        columns = ("stall", "durable", "resume from memory", "resume from disk")
        cells = [f"{median(times[name][what]):,.0f} ms" if what in times[name] else "-" for what in columns]
        rows.append(f"| {gigabytes:g} GB, {sharding} | {name} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sharding", choices=["none", "fsdp2"], default="none")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = ddp.init("gloo")
    folder = Path(os.environ.get("FOLDER") or tempfile.gettempdir()) / f"ddp-bench-checkpoints-{os.getppid()}"
    if place.rank == 0:
        print("| state | | stall | durable | resume from memory | resume from disk |")
        print("|---|---|---:|---:|---:|---:|")
    try:
        for gigabytes in options.gb:
            rows = measured(gigabytes, options.sharding, options.rounds, folder / f"{gigabytes:g}")
            if place.rank == 0:
                print("\n".join(rows), flush=True)
            dist.barrier()
    finally:
        if place.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    ddp.shutdown()


if __name__ == "__main__":
    main()
