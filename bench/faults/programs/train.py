"""Trains a tiny model and, in the first generation, does at one place what its command line tells it to.

    train.py FOLDER [--fault NAME@PLACE] [--guilty RANK ...] [--wrap torch|ours|plain]
                    [--backend gloo|shm|nccl_like] [--timeout S] [--loaders N] [--survives] [--handles-sigterm]
                    [--device cpu|cuda] [--in-place]

Every step takes data, goes forward, backward, through the optimizer, sums a figure over all ranks (`tally`) and now
and then writes a checkpoint. The guilty ranks commit the fault at step 20, at its place (see faults.py). A fault from
outside needs none here: the ranks tell who they are at the same step. The generation after it takes three steps. With
--in-place the loop runs inside `State.run` of ddp.elastic, and survivors go on there with their processes.

    FOLDER/reached-RANK      the pid of a rank that has come to step 20 of the first generation
    FOLDER/injected-RANK     when the fault began there, by the monotonic clock of this machine
    FOLDER/trains-RANK       the pid of a rank of a later generation
    FOLDER/met               when all ranks of a later generation had agreed where to go on
    FOLDER/again             when they had done a step
    FOLDER/survived          the first generation came to its own end, as it should with --survives
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import device_faults
import faults
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

NCCL_LIKE = str(
    Path(__file__).parents[3] / "tests" / "nccl"
)  # tests/nccl, whose package nccl_like is a backend
AT_STEP = 20  # by then every rank has passed for one that trains, with an optimizer of torch or without
STEPS_AGAIN = 3
STEPS_OF_SURVIVORS = 15
BATCH = 4
CHECKPOINT_EVERY = 5
PACE_S = 0.01  # what a real model would compute


class Scene:
    """What a fault is told: who and where we are, and what else it may break."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.folder = Path(asked.folder)
        self.step = 0
        self.pairs: list[Any] = []  # groups that a fault of order needs
        name, _, self.place = asked.fault.partition("@")
        guilty = self.generation == 1 and self.rank in asked.guilty
        self.fault = fault_named(name) if name and guilty else None
        self.device = torch.device("cpu")

    @property
    def generation(self) -> int:
        return int(os.environ["DDP_GENERATION"])  # a rank that is healed goes on in the next one

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def at(self, place: str) -> bool:
        """True where the fault stood in for what is usually done there."""
        if self.fault is None or place != self.place or (place != "start" and self.step < AT_STEP):
            return False
        fault, self.fault = self.fault, None
        self.note(f"injected-{self.rank}", str(time.monotonic()))
        return bool(fault(self))

    def note(self, name: str, text: str) -> None:
        part = self.folder / f".{name}-{os.getpid()}"
        part.write_text(text)
        part.rename(self.folder / name)


def fault_named(name: str) -> Any:
    if name.startswith("nccl_"):
        import nccl_faults

        return getattr(nccl_faults, name)
    return getattr(faults, name, None) or getattr(device_faults, name)


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            self._scene.step = at // BATCH  # its own copy
        self._scene.at("data")
        sample = torch.full((8,), float(at % 7))
        return sample, sample.sum().reshape(1)


class Model(nn.Module):
    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scene = scene
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._scene.at("forward")
        y: torch.Tensor = self.layers(x)
        if y.requires_grad:
            y.register_hook(self._on_gradient)
        return y

    def _on_gradient(self, _gradient: torch.Tensor) -> None:
        self._scene.at("backward")


def wrapped(model: Model, how: str) -> nn.Module:
    if how == "ours":
        import ddp

        return ddp.DistributedDataParallel(model)
    return nn.parallel.DistributedDataParallel(model) if how == "torch" else model


class Descent:
    """What a script does for itself that uses neither DDP nor torch's optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            dist.all_reduce(parameter.grad)
            parameter -= parameter.grad * (1e-3 / dist.get_world_size())


def meet(scene: Scene) -> None:
    """Where to go on: the newest checkpoint that all can read."""
    if scene.generation > 1:
        scene.note(f"trains-{scene.rank}", str(os.getpid()))
    newest = torch.zeros(1, device=scene.device)
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    newest.tolist()
    if scene.rank == 0 and scene.generation > 1:
        scene.note("met", str(time.monotonic()))


def made(scene: Scene, asked: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = wrapped(Model(scene).to(scene.device), asked.wrap)
    return model, Descent(model) if asked.wrap == "plain" else torch.optim.SGD(model.parameters(), lr=1e-3)


def train_in_place(scene: Scene, asked: argparse.Namespace) -> None:
    from ddp import elastic

    model, optimizer = made(scene, asked)
    kept = {"model": model} | ({} if asked.wrap == "plain" else {"optimizer": optimizer})
    state = elastic.State(**kept)

    def attempt() -> None:
        meet(scene)
        train(scene, asked, model, optimizer, state.commit)

    state.run(attempt)
    state.close()


def train(
    scene: Scene, asked: argparse.Namespace, model: nn.Module, optimizer: Any, commit: Callable[[], None]
) -> None:
    scene.step = 0
    figure = torch.zeros(4, device=scene.device)
    last = STEPS_AGAIN if scene.generation > 1 else AT_STEP + STEPS_OF_SURVIVORS if asked.survives else 10**9
    for inputs, targets in DataLoader(Samples(scene), batch_size=BATCH, num_workers=asked.loaders):
        scene.step += 1
        if scene.step == AT_STEP and scene.generation == 1:
            scene.note(f"reached-{scene.rank}", str(os.getpid()))
        if scene.at("step") or scene.step > last:
            break
        time.sleep(PACE_S)
        optimizer.zero_grad()
        loss = (model(inputs.to(scene.device)) - targets.to(scene.device)).square().mean()
        loss.backward()
        optimizer.step()
        figure[0] = loss.detach()
        any(map(scene.at, ("tally", "two groups", "pairs"))) or dist.all_reduce(figure)
        commit()
        figure.tolist()  # shown, as scripts do: on an accelerator the rank waits here for what it has begun
        if scene.rank == 0 and scene.generation > 1 and scene.step == 1:
            scene.note("again", str(time.monotonic()))
        if scene.step % CHECKPOINT_EVERY == 0:
            scene.at("checkpoint") or checkpoint(scene, model)


def on_a_card() -> torch.device:
    """Of this rank, which may share it with others."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gpu"))
    from gpu_part import place

    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device(place(rank, local_rank, ranks))
    torch.get_device_module(device.type).set_device(device)
    return device


def checkpoint(scene: Scene, model: nn.Module) -> None:
    if scene.rank == 0:
        torch.save(model.state_dict(), scene.folder / "model.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--fault", default="")
    parser.add_argument("--guilty", type=int, nargs="*", default=[])
    parser.add_argument("--wrap", default="torch")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--survives", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--timeout", type=float, default=0.0, help="of the process group")
    parser.add_argument("--handles-sigterm", action="store_true")
    parser.add_argument("--in-place", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.backend == "nccl_like":
        sys.path.append(NCCL_LIKE)
        import nccl_like

        nccl_like.register()
    scene = Scene(asked)
    if asked.device != "cpu":
        scene.device = on_a_card()
    if asked.handles_sigterm:
        signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(143))
    scene.at("start")
    if asked.backend == "shm":
        import ddp.shm

        assert ddp.shm.register(), "the compiled core is not there"
    timeout = timedelta(seconds=asked.timeout) if asked.timeout else None
    dist.init_process_group(asked.backend, timeout=timeout)
    if not asked.in_place:
        meet(scene)
    if scene.place == "two groups":
        scene.pairs = [dist.new_group(), dist.new_group()]
    elif scene.place == "pairs":
        scene.pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if asked.in_place:
        train_in_place(scene, asked)
    else:
        train(scene, asked, *made(scene, asked), lambda: None)
    dist.barrier()
    scene.at("end")
    if scene.rank == 0 and scene.generation == 1:
        scene.note("survived", str(time.monotonic()))
    dist.destroy_process_group()
    # A thread of Gloo that lets go of a tensor while the interpreter ends would abort the process: torch's own race.
    os._exit(0)


if __name__ == "__main__":
    main()
