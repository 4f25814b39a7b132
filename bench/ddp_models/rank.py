"""One rank of a bench: contenders train copies of one model in turns. Everything it is to do is in trial.json."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS

import ddp.shm
from ddp import DistributedDataParallel
from ddp.elastic import State

WARM_UP_STEPS = 5
ROUND_S = 0.3
PHASES = ("forward", "backward", "optimizer")


@dataclass
class Contender:
    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    micro_batches: int
    tie: Any = None  # where nothing is communicated: what keeps the ranks in step
    state: State | None = None  # each step ends with a commit() of it

    def train(self, batch: torch.Tensor, spent: dict[str, float]) -> None:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        for number in range(self.micro_batches):
            last = number + 1 == self.micro_batches
            local = not last and self.tie is None
            with self.model.no_sync() if local else nullcontext():
                loss = self.model(batch).square().mean()
                forwarded = time.perf_counter()
                loss.backward()
            done = time.perf_counter()
            spent["forward"] += forwarded - began
            spent["backward"] += done - forwarded
            began = done
        if self.tie is not None:
            dist.all_reduce(torch.zeros(1), group=self.tie)
        self.optimizer.step()
        if self.state is not None:
            self.state.step += 1
            self.state.commit()
        spent["optimizer"] += time.perf_counter() - began


def contender(asked: dict[str, Any], model_name: str, groups: dict[str, Any]) -> Contender:
    torch.manual_seed(0)
    model = MODELS[model_name][0]()
    micro_batches = asked.get("micro_batches", 1)
    if asked["kind"] == "alone":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return Contender(asked["name"], model, optimizer, micro_batches, groups["shm"])
    wrap: Any = (
        DistributedDataParallel if asked["kind"] == "ours" else torch.nn.parallel.DistributedDataParallel
    )
    given = {key: asked[key] for key in ("bucket_cap_mb", "gradient_as_bucket_view") if key in asked}
    wrapped = wrap(model, process_group=groups[asked["backend"]], **given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    state = None
    if "every" in asked:
        state = State(model=wrapped, optimizer=optimizer, step=0, every=asked["every"])
    return Contender(asked["name"], wrapped, optimizer, micro_batches, state=state)


def one_turn(one: Contender, batch: torch.Tensor, steps: int) -> dict[str, float]:
    """Seconds for one micro-batch, and what they went into; gradients are let go of, as others come next."""
    dist.barrier()
    spent = dict.fromkeys(PHASES, 0.0)

    def turn() -> None:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            one.train(batch, spent)
        spent.update(step=time.perf_counter() - began, cpu=time.process_time() - used)

    turn() if one.state is None else one.state.run(turn)
    one.optimizer.zero_grad()
    return {name: value / (steps * one.micro_batches) for name, value in spent.items()}


def steps_of_a_turn(one: Contender, batch: torch.Tensor) -> int:
    count = torch.tensor([min(30, max(2, round(ROUND_S / one_turn(one, batch, 2)["step"])))])
    dist.broadcast(count, 0)
    return int(count)


def run(trial: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    torch.manual_seed(1 + dist.get_rank())
    batch = MODELS[trial["model"]][1]()
    contenders = [contender(asked, trial["model"], groups) for asked in trial["contenders"]]
    for one in contenders:
        one_turn(one, batch, WARM_UP_STEPS)
    steps = trial.get("steps") or steps_of_a_turn(contenders[0], batch)
    taken: dict[str, list[dict[str, float]]] = {one.name: [] for one in contenders}
    for number in range(trial["rounds"]):
        turn = number % len(contenders)
        for one in contenders[turn:] + contenders[:turn]:
            taken[one.name].append(one_turn(one, batch, steps))
    for one in contenders:
        if one.state is not None:
            one.state.close()
    return taken


def main() -> None:
    folder = sys.argv[1]
    with open(os.path.join(folder, "trial.json")) as file:
        trial = json.load(file)
    torch.set_num_threads(1)
    assert ddp.shm.register(), "the compiled core is not there"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    taken = run(trial)
    if rank == 0:
        with open(os.path.join(folder, "taken.json"), "w") as file:
            json.dump(taken, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
