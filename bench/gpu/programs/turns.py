"""Contenders that train copies of one model in turns, in the same process, on one device or on several ranks.

In every round each contender trains for a moment, in an order that rotates, so that other changes on the machine affect
all of them. A ratio is taken within a round. Two times are taken of each turn:

- `step`: the whole turn without a wait in between, over its number of steps, as training does it.
- `cpu`: the CPU time of this process during the backward alone, with the device idle before. It shows what the reducer
  costs the processor, which on a GPU is hidden as long as the device has enough work queued.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import rank
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_TURN_S = 0.1 if rank.gpu_part.IS_REHEARSAL else 0.5
ROUNDS = 2 if rank.gpu_part.IS_REHEARSAL else 9
_WARM_UP_STEPS = 4
_CPU_STEPS = 3
# Where ranks share a card, threads of NCCL wait for the turns of the other ranks, which takes CPU time.
HAS_CPU_TIMES = rank.PLACE == "cpu" or rank.RANKS <= rank.gpu_part.CARDS


@dataclass
class Contender:
    name: str
    model: Any
    loss: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()


def contender(
    name: str, make: Callable[[], Any], loss: Callable[[Any], torch.Tensor], wrap: Callable[[Any], Any]
) -> Contender:
    torch.manual_seed(0)
    wrapped = wrap(make())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    return Contender(name, wrapped, loss, optimizer)


def together() -> None:
    """All ranks begin a turn at the same time, with an idle device."""
    rank.synchronize()
    dist.barrier()
    rank.synchronize()


def turn(one: Contender, steps: int) -> tuple[float, float]:
    together()
    began = time.perf_counter()
    for _ in range(steps):
        one.train()
    rank.synchronize()
    step_s = (time.perf_counter() - began) / steps
    cpu_steps = _CPU_STEPS if HAS_CPU_TIMES else 0
    return step_s, sum(cpu_of_backward(one) for _ in range(cpu_steps)) / max(1, cpu_steps)


def cpu_of_backward(one: Contender) -> float:
    one.optimizer.zero_grad()
    loss = one.loss(one.model)
    rank.synchronize()
    began = time.process_time()
    loss.backward()
    spent = time.process_time() - began
    one.optimizer.step()
    rank.synchronize()
    return spent


def agreed(number: int) -> int:
    """What rank 0 says: all ranks take the same number of steps and rounds."""
    said: list[Any] = [number]
    if rank.RANKS > 1:
        dist.broadcast_object_list(said, 0)
    return int(said[0])


def rounds(contenders: list[Contender], report: Callable[[], None]) -> None:
    """Fill in the times. `report` is called after each round, so that what was measured is kept."""
    for one in contenders:
        for _ in range(_WARM_UP_STEPS):
            one.train()
    once_s = turn(contenders[0], 2)[0]
    steps = agreed(min(30, max(2, round(_TURN_S / once_s))))
    for number in range(ROUNDS):
        if agreed(number > 1 and time.monotonic() > rank.gpu_part.DEADLINE):
            break
        first = number % len(contenders)
        for one in contenders[first:] + contenders[:first]:
            step_s, cpu_s = turn(one, steps)
            one.step_s.append(step_s)
            one.cpu_s.append(cpu_s)
        if rank.RANK == 0:
            report()


def in_ms(times: list[float]) -> list[float]:
    return [round(each * 1e3, 4) for each in times]
