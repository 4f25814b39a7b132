"""One rank of bench/paper.py: each function measures one figure of the DDP paper, and returns its series on rank 0."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(_HERE), os.path.join(_HERE, "ddp_models")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import MODELS, Sleepy, Writer, asleep, resnet  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402

import ddp.shm  # noqa: E402
from ddp import DistributedDataParallel, init  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

# name -> points (x, seconds or loss)
Series = dict[str, list[tuple[float, float]]]
TORCH, OURS = "torch, Gloo", "ours"
_TOTAL = 60_000_000
_WARM_UP = 3


def median_of(repeats: int, measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(repeats))


def timed(work: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- figure 2, left: all-reduce of 60M float32 in chunks ------------------------------------------------


def chunks(trial: dict[str, Any]) -> Series:
    total = trial.get("total", _TOTAL)
    found: Series = {}
    for backend in trial["backends"]:
        group = dist.new_group(backend=backend) if backend != "mpi4py" else dist.group.WORLD
        tensor = torch.zeros(total)
        for size in trial["sizes"]:

            def work(group: Any = group, tensor: torch.Tensor = tensor, size: int = size) -> None:
                works = [dist.all_reduce(part, group=group, async_op=True) for part in tensor.split(size)]
                for each in works:
                    each.wait()

            work()
            found.setdefault(backend, []).append((size, median_of(trial["rounds"], lambda: timed(work))))
    return found


# --- figure 2, right: when gradients are ready ---------------------------------------------------------


def ready(trial: dict[str, Any]) -> Series:
    """The share of parameters whose gradients are ready, by time since the start of the backward."""
    models: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
        "ResNet-152": (lambda: resnet((3, 8, 36, 3)), lambda: torch.randn(2, 3, 96, 96)),
        "BERT-base-sized": (lambda: Writer(30_522, 768), lambda: torch.randint(0, 30_522, (1, 64))),
    }
    found: Series = {}
    for name in trial["models"]:
        model, batch = models[name][0](), models[name][1]()
        arrivals = [_arrivals(model, batch) for _ in range(_WARM_UP + trial["rounds"])][_WARM_UP:]
        middle = sorted(arrivals, key=lambda points: points[-1][1])[len(arrivals) // 2]
        found[name] = middle[:: max(1, len(middle) // 40)] + middle[-1:]
    return found


def _arrivals(model: nn.Module, batch: torch.Tensor) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    count, began = 0, 0.0

    def arrived(parameter: torch.Tensor) -> None:
        nonlocal count
        count += parameter.numel()
        points.append((count, time.perf_counter() - began))

    handles = [each.register_post_accumulate_grad_hook(arrived) for each in model.parameters()]
    model.zero_grad()
    loss = model(batch).square().mean()
    began = time.perf_counter()
    loss.backward()
    for handle in handles:
        handle.remove()
    return points


# --- figures 6 to 12: steps ------------------------------------------------------------------------------


def wrapped(kind: str, model: nn.Module, group: Any, **how: Any) -> Any:
    wrap: Any = DistributedDataParallel if kind == OURS else nn.parallel.DistributedDataParallel
    return wrap(model, process_group=group, **how)


def contenders(trial: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Name, kind and group."""
    fast = trial["fast"]
    return [
        (TORCH, TORCH, dist.new_group(backend="gloo")),
        (f"ours, {fast}", OURS, dist.new_group(backend=fast)),
    ]


class Training:
    def __init__(self, model: Any, batch: torch.Tensor, *, cadence: int = 1) -> None:
        self.model, self.batch, self.cadence = model, batch, cadence
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(self) -> None:
        """As many micro-batches as are averaged together."""
        self.optimizer.zero_grad()
        for number in range(self.cadence):
            last = number + 1 == self.cadence
            with nullcontext() if last else self.model.no_sync():
                self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def in_turns(trainings: dict[str, Training], rounds: int) -> dict[str, float]:
    """The median seconds of a micro-batch, all trained alternately."""
    for one in trainings.values():
        for _ in range(_WARM_UP):
            one.step()
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    names = list(trainings)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken[name].append(timed(trainings[name].step) / trainings[name].cadence)
    return {name: statistics.median(each) for name, each in taken.items()}


def buckets(trial: dict[str, Any]) -> Series:
    def of(cap: float, kind: str, group: Any, model: nn.Module, batch: torch.Tensor) -> Training:
        return Training(wrapped(kind, model, group, bucket_cap_mb=cap), batch)

    return _varied(trial, trial["caps"], of)


def _varied(trial: dict[str, Any], values: list[float], of: Callable[..., Training]) -> Series:
    """The seconds of each contender by a value, from which `of` makes its training."""
    make, batch = MODELS[trial["model"]]
    found: Series = {}
    for name, kind, group in contenders(trial):
        trainings = {str(value): of(value, kind, group, make(), batch()) for value in values}
        taken = in_turns(trainings, trial["rounds"])
        found[name] = [(value, taken[str(value)]) for value in values]
    return found


def overlap(trial: dict[str, Any]) -> Series:
    """A step with overlap, without it (the same buckets after the backward), and without communication."""
    make, batch = MODELS[trial["model"]]
    found: Series = {}
    for name, kind, group in contenders(trial):
        trainings: dict[str, Any] = {
            "overlapped": Training(wrapped(kind, make(), group), batch()),
            "after the backward": _Later(wrapped(kind, make(), group), batch(), group),
            "alone": _Alone(make(), batch()),
        }
        found[name] = list(enumerate(in_turns(trainings, trial["rounds"]).values()))
    return found


class _Later(Training):
    """Averages in buckets of 25 MiB when the backward is over."""

    def __init__(self, model: Any, batch: torch.Tensor, group: Any) -> None:
        super().__init__(model, batch)
        self.group = group

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            self.model(self.batch).square().mean().backward()
        gradients = [each.grad for each in reversed(list(self.model.parameters()))]
        for bucket in _in_buckets(gradients, 25 << 20):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size()
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self.optimizer.step()


class _Alone(Training):
    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def _in_buckets(gradients: list[Any], limit: int) -> list[list[Any]]:
    made: list[list[Any]] = [[]]
    size = 0
    for gradient in gradients:
        if size >= limit:
            made.append([])
            size = 0
        made[-1].append(gradient)
        size += gradient.numel() * 4
    return made


def skip(trial: dict[str, Any]) -> Series:
    def of(cadence: int, kind: str, group: Any, model: nn.Module, batch: torch.Tensor) -> Training:
        return Training(wrapped(kind, model, group), batch, cadence=cadence)

    return _varied(trial, trial["cadences"], of)


def robin(trial: dict[str, Any]) -> Series:
    """Buckets go to several groups in turn, each with connections and threads of its own."""
    make, batch = MODELS[trial["model"]]
    groups = [dist.new_group(backend="gloo") for _ in range(max(trial["groups"]))]
    trainings = {}
    for count in trial["groups"]:
        model = wrapped(OURS, make(), groups[0], bucket_cap_mb=trial["cap"])
        model.register_comm_hook(groups[:count], _in_turn)
        trainings[str(count)] = Training(model, batch())
    taken = in_turns(trainings, trial["rounds"])
    return {"ours, Gloo": [(count, taken[str(count)]) for count in trial["groups"]]}


def _in_turn(groups, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations, and these are text here
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, group=groups[bucket.index() % len(groups)], async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class Backwards(nn.Module):
    """Layers that are registered in the reverse of the order in which they run, and leave the processor idle."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(reversed(list(Sleepy().parts)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in reversed(list(self.parts)):
            x = asleep(x + part.sum())
        return x


def order(trial: dict[str, Any]) -> Series:
    """Buckets in the order of arrival, and in the reverse order of registration, which the first step uses."""
    found: Series = {}
    models = {"runs out of order": (Backwards, lambda: torch.zeros(1)), **MODELS}
    for name in trial["models"]:
        make, batch = models[name]
        for contender, kind, group in contenders(trial)[1:]:
            rebuilt = wrapped(kind, make(), group, bucket_cap_mb=trial["cap"])
            fixed = wrapped(kind, make(), group, bucket_cap_mb=trial["cap"])
            fixed.reducer.core.rebuilt = True
            taken = in_turns(
                {"reverse": Training(fixed, batch()), "arrival": Training(rebuilt, batch())}, trial["rounds"]
            )
            found[f"{contender}: {name}"] = [(0, taken["reverse"]), (1, taken["arrival"])]
    return found


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "all_reduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
}


def hooks(trial: dict[str, Any]) -> Series:
    make, batch = MODELS[trial["model"]]
    group = dist.group.WORLD
    trainings = {}
    for name in trial["hooks"]:
        model = wrapped(OURS, make(), group)
        model.register_comm_hook(*HOOKS[name]())
        trainings[name] = Training(model, batch())
    taken = in_turns(trainings, trial["rounds"])
    return {name: [(0, taken[name]), (1, _learn(trial, name, 1, group)[-1][1])] for name in trial["hooks"]}


# --- loss ---------------------------------------------------------------------------------------------------


def loss(trial: dict[str, Any]) -> Series:
    """The loss over samples, with an average every 1, 2, 4 and 8 micro-batches."""
    group = dist.new_group(backend=trial["fast"])
    return {
        f"every {cadence}": [
            (samples, value) for samples, value in _learn(trial, "all_reduce", cadence, group)
        ]
        for cadence in trial["cadences"]
    }


def _learn(trial: dict[str, Any], hook: str, cadence: int, group: Any) -> list[tuple[float, float]]:
    """Teach a small network a fixed function of random inputs; return the loss on samples that it does not train."""
    torch.manual_seed(7)
    teacher, student = _network(), _network()
    model = wrapped(OURS, student, group)
    if hook != "all_reduce":
        model.register_comm_hook(*HOOKS[hook]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chance = torch.Generator().manual_seed(100 + dist.get_rank())
    held_out = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    curve, batch = [], 16
    for number in range(trial["batches"] // cadence):
        optimizer.zero_grad()
        for micro in range(cadence):
            inputs = torch.randn(batch, 64, generator=chance)
            with nullcontext() if micro + 1 == cadence else model.no_sync():
                error = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
                (error / cadence).backward()
        optimizer.step()
        samples = (number + 1) * cadence * batch * dist.get_world_size()
        if (number + 1) * cadence % (trial["batches"] // 10) == 0:
            with torch.no_grad():
                curve.append((samples, float(nn.functional.mse_loss(student(held_out), teacher(held_out)))))
    return curve


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))


FIGURES = {each.__name__: each for each in (chunks, ready, buckets, overlap, skip, robin, order, hooks, loss)}


def main() -> None:
    torch.set_num_threads(1)
    assert ddp.shm.register(), "the compiled core is not there"
    folder = sys.argv[1]
    with open(os.path.join(folder, "trial.json")) as file:
        trial: dict[str, Any] = json.load(file)
    if trial.get("mpi"):
        init("mpi")
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = FIGURES[trial["figure"]](trial)
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "taken.json"), "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
