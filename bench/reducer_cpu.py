"""CPU time that a reducer adds to a step of the training thread: torch's in C++ and ours, nothing communicated.

    python bench/reducer_cpu.py [--rounds 100] [--models '2,000 x 1,000' ...] [--options plain views unused accumulate]
                                [--json FILE]

There is one rank over Gloo, so nothing is communicated. Gloo works on another thread. In every round each contender
trains one step, in an order that rotates. A contender's figure is the CPU time of its training thread
(`time.thread_time`) in its best round: other programs can only add to it. The figure of a step without
a wrapper is subtracted. What remains is the wrapper: its forward, the hooks, the copies and the end of the backward.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_models"))

import torch
import torch.distributed as dist
from models import MODELS
from shown import machine, option_parser

import ddp

if TYPE_CHECKING:
    from collections.abc import Callable

ALONE, TORCH, OURS = "alone", "torch", "ours"
WRAPPERS: dict[str, Callable[..., Any]] = {
    TORCH: torch.nn.parallel.DistributedDataParallel,
    OURS: ddp.DistributedDataParallel,
}
# What a line measures: the arguments of both wrappers, and whether gradients are kept and zeroed in place.
OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "views": ({"gradient_as_bucket_view": True}, True),
    "unused": ({"find_unused_parameters": True}, False),
    "accumulate": ({}, True),
}
WARM_UP_STEPS = 12


@dataclass
class Contender:
    model: Any
    keeps: bool

    def train(self, batch: torch.Tensor) -> float:
        """CPU seconds of this thread in one step."""
        began = time.thread_time()
        self.model.zero_grad(set_to_none=not self.keeps)
        self.model(batch).square().mean().backward()
        return time.thread_time() - began


@dataclass(frozen=True)
class Line:
    model: str
    option: str
    parameters: int
    alone_us: float
    torch_us: float
    ours_us: float
    first_torch_us: float
    first_ours_us: float

    def __str__(self) -> str:
        ratio = self.ours_us / self.torch_us if self.torch_us > 0 else float("nan")
        return (
            f"| {self.model} | {self.option} | {self.parameters:,} | {self.torch_us:,.0f} us | {self.ours_us:,.0f} us "
            f"| {ratio:.2f} | {self.torch_us / self.parameters:.2f} us | {self.ours_us / self.parameters:.2f} us "
            f"| {self.first_torch_us:,.0f} us | {self.first_ours_us:,.0f} us |"
        )


def contenders_of(model: str, option: str) -> dict[str, Contender]:
    given, keeps = OPTIONS[option]
    made = {ALONE: Contender(MODELS[model][0](), keeps)}
    for name, wrap in WRAPPERS.items():
        made[name] = Contender(wrap(MODELS[model][0](), init_sync=False, **given), keeps)
    return made


def measured(model: str, option: str, rounds: int) -> Line:
    batch = MODELS[model][1]()
    contenders = contenders_of(model, option)
    firsts = {name: one.train(batch) for name, one in contenders.items()}
    for _ in range(WARM_UP_STEPS):
        for one in contenders.values():
            one.train(batch)
    names = list(contenders)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent[name].append(contenders[name].train(batch))
    count = len(list(contenders[ALONE].model.parameters()))
    least = {name: min(values) * 1e6 for name, values in spent.items()}
    figures = [least[ALONE], least[TORCH] - least[ALONE], least[OURS] - least[ALONE]]
    return Line(
        model, option, count, *figures, *((firsts[name] - firsts[ALONE]) * 1e6 for name in (TORCH, OURS))
    )


def main() -> None:
    options = option_parser(__doc__ or "", rounds=100)
    options.add_argument("--models", nargs="+", default=["2,000 x 1,000", "GPT-like, 30M"])
    options.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    asked = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lines = []
    for model in asked.models:
        for option in asked.options:
            lines.append(measured(model, option, asked.rounds))
            print(lines[-1], flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"machine": machine(), "lines": [vars(line) for line in lines]}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
