"""The part `commit`: how long `ddp.elastic` holds up the training of a GPT with Adam, in one process.

Steps and commits alternate. A commit is compared with the least that it must do: a copy of the same tensors from the
device to pinned memory of the host (on a CPU: to other memory).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import rank
import torch
from gpu_models import TITLES, gpt

import ddp
from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 2 if rank.gpu_part.IS_REHEARSAL else 9


def timed_ms(action: Callable[[], object]) -> float:
    rank.synchronize()
    began = time.perf_counter()
    action()
    rank.synchronize()
    return round((time.perf_counter() - began) * 1e3, 4)


def main() -> None:
    where = rank.device()
    ddp.init(device=where)
    make, loss = gpt(where)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    step()
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    pinned = where.type != "cpu"
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors]

    def copy() -> None:
        for into, tensor in zip(copies, tensors, strict=True):
            into.copy_(tensor, non_blocking=True)

    state = elastic.State(model=model, optimizer=optimizer, step=0)
    state.resume()
    for _slot in range(2):  # the first commit into each slot asks the kernel for its memory
        state.commit()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
    name = f"{TITLES['gpt']}, Adam, {size:,.0f} MiB"
    steps: list[float] = []
    copied: list[float] = []
    held_up: list[float] = []
    for _round in range(_ROUNDS):
        steps.append(timed_ms(step))
        held_up.append(timed_ms(state.commit))
        copied.append(timed_ms(copy))
    rank.gpu_part.found(
        "comparison", table="commit", name=name, unit="ms", theirs=copied, ours=held_up, target=None
    )
    rank.gpu_part.found("figure", table="commit", name=f"{name}: a step", unit="ms", values=steps, limit=None)
    state.close()
    ddp.shutdown()


if __name__ == "__main__":
    main()
