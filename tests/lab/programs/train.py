"""Trains a tiny model until it is told to stop; on the way it fails in whatever way it is ordered to.

    train.py FOLDER                     as a rank; FOLDER is shared by all nodes
    train.py FOLDER --alone STEPS       the same steps in one process: what the loss must be at each of them

Every step takes the same batch whatever the size of the world, so the loss at a step is the same number in each run.
After each step a checkpoint is written, then nothing of it is lost by a fault. The last thing that each step shares
is whether rank 0 saw the order to finish, so all ranks stop after the same step.

    FOLDER/curve                        one line per step: its number, the loss, the generation
    FOLDER/model-STEP.pt                checkpoints, the last few
    FOLDER/ranks/GENERATION-RANK        who runs where
    FOLDER/orders/RANK                  what this rank is to do next; taken away when it obeys
    FOLDER/finish                       it is time to end
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SHARED = Path(sys.argv[1])
BATCH = 12  # divides evenly among 1, 2, 3 and 4 ranks
PACE_S = 0.02  # what a real model would compute
CHECKPOINTS_KEPT = 4


class Training:
    """Without DDP and torch's optimizers: they import torch._dynamo, as long as torch itself, on each node."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        self.model = torch.nn.Sequential(*layers).double()
        self.momentum = torch.zeros(
            sum(each.numel() for each in self.model.parameters()), dtype=torch.float64
        )

    def load(self, step: int) -> None:
        if step:
            model, self.momentum = torch.load(SHARED / f"model-{step}.pt", weights_only=True)
            self.model.load_state_dict(model)

    def save(self, step: int) -> None:
        part = SHARED / f"model-{step}.part-{socket.gethostname()}-{os.getpid()}"
        torch.save((self.model.state_dict(), self.momentum), part)
        part.rename(SHARED / f"model-{step}.pt")
        (SHARED / f"model-{step - CHECKPOINTS_KEPT}.pt").unlink(missing_ok=True)

    def step(self, number: int, rank: int, world_size: int) -> torch.Tensor:
        """This rank's part of the batch's loss."""
        chance = torch.Generator().manual_seed(number)
        inputs = torch.randn(BATCH, 4, generator=chance, dtype=torch.float64)
        targets = inputs.sum(1, keepdim=True) + torch.randn(BATCH, 1, generator=chance, dtype=torch.float64)
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        loss = torch.nn.functional.mse_loss(self.model(inputs[mine]), targets[mine])
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        mean = torch.cat([each.flatten() for each in gradients]) / world_size
        if world_size > 1:
            dist.all_reduce(mean)
        self._descend(mean)
        return loss.detach() / world_size

    @torch.no_grad()
    def _descend(self, gradient: torch.Tensor) -> None:
        self.momentum = 0.9 * self.momentum + gradient
        parameters = list(self.model.parameters())
        steps = self.momentum.split([each.numel() for each in parameters])
        for parameter, step in zip(parameters, steps, strict=True):
            parameter -= 0.05 * step.view_as(parameter)


def alone(steps: int) -> None:
    training = Training()
    for number in range(1, steps + 1):
        print(number, training.step(number, 0, 1).item().hex())


def newest_step() -> int:
    return max((int(path.stem.partition("-")[2]) for path in SHARED.glob("model-*.pt")), default=0)


def tell_who_runs_here(rank: int, world_size: int, generation: str) -> None:
    told = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": world_size}
    told |= {name: os.environ[name] for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")}
    part = SHARED / "ranks" / f".{generation}-{rank}-{socket.gethostname()}"
    part.write_text(json.dumps(told))
    part.rename(SHARED / "ranks" / f"{generation}-{rank}")


def obey(rank: int) -> None:
    order, path = "", SHARED / "orders" / str(rank)
    with contextlib.suppress(FileNotFoundError):
        order = path.read_text()
        path.unlink()
    match order.split():
        case ["raise", *words]:
            raise ValueError(" ".join(words))
        case ["exit", code]:
            sys.exit(int(code))
        case ["stuck"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (SHARED / "stuck").touch()
            while True:  # without giving the GIL back: no signal's Python function, no other thread runs
                ctypes.PyDLL(None).sleep(1000)


def as_rank() -> None:
    dist.init_process_group("gloo")
    rank, world_size, generation = dist.get_rank(), dist.get_world_size(), os.environ["DDP_GENERATION"]
    begin = torch.tensor(newest_step() if rank == 0 else 0)
    dist.broadcast(begin, 0)
    training = Training()
    training.load(int(begin))
    tell_who_runs_here(rank, world_size, generation)
    number, finish = int(begin), False
    with (SHARED / "curve").open("a", buffering=1) as curve:
        while not finish:
            number += 1
            obey(rank)
            time.sleep(PACE_S)
            loss = training.step(number, rank, world_size)
            seen = float(rank == 0 and (SHARED / "finish").exists())
            shared = torch.stack([loss, torch.tensor(seen, dtype=torch.float64)])
            dist.all_reduce(shared)
            finish = bool(shared[1])
            if rank == 0:
                curve.write(f"{number} {shared[0].item().hex()} {generation}\n")
                training.save(number)
    dist.destroy_process_group()
    # A thread of Gloo that lets go of a tensor while the interpreter ends would abort the process: torch's own race,
    # and none of what is played here.
    os._exit(0)


torch.set_num_threads(1)
if sys.argv[2:]:
    alone(int(sys.argv[3]))
else:
    as_rank()
