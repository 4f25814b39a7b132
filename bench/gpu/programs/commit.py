"""The part `commit`: how long `ddp.elastic` holds up the training of a GPT with Adam, in one process.

- *Held up:* the time that the training thread spends in the call, after a step that the device has not finished. Beside
  `dcp.async_save` of torch, as its documentation has it, with its cache of the copy.
- *Steps:* several of them with a commit each and without, until the device has finished. This is what the copies on the
  device and beside the training cost the steps.
- *Complete:* until the commit exists, after an idle device. A copy of the same tensors to pinned memory is the least.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

import rank
import torch
import torch.distributed.checkpoint as dcp
from gpu_models import TITLES, gpt
from torch.distributed.checkpoint import state_dict as states

import ddp
from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS, _STEPS = (2, 2) if rank.gpu_part.IS_REHEARSAL else (5, 5)


def timed_ms(action: Callable[[], object], until_finished: bool = True) -> float:
    began = time.perf_counter()
    action()
    if until_finished:
        rank.synchronize()
    return round((time.perf_counter() - began) * 1e3, 4)


class Training:
    def __init__(self, where: torch.device) -> None:
        make, self._loss = gpt(where)
        self.model = make()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.step()
        self.tensors = [parameter.detach() for parameter in self.model.parameters()]
        self.tensors += [
            each[name] for each in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        ]
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors) / 2**20
        self.name = f"{TITLES['gpt']}, Adam, {size:,.0f} MiB"

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self.model).backward()
        self.optimizer.step()


class AsyncSave:
    """torch's checkpoint, written by a thread."""

    def __init__(self, training: Training, folder: str) -> None:
        self._training = training
        self._writer = dcp.FileSystemWriter(folder, cache_staged_state_dict=rank.PLACE != "cpu")
        self._running: Any = None

    def save(self) -> None:
        model, optimizer = states.get_state_dict(self._training.model, self._training.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process has no process group to share the work with
            self._running = dcp.async_save(
                {"model": model, "optimizer": optimizer}, storage_writer=self._writer
            )

    def wait(self) -> None:
        self._running.result()


def held_up(training: Training, call: Callable[[], object], wait: Callable[[], object]) -> float:
    rank.synchronize()
    training.step()
    took = timed_ms(call, until_finished=False)
    wait()
    return took


def steps(training: Training, and_then: Callable[[], object]) -> None:
    for _ in range(_STEPS):
        training.step()
        and_then()


def main() -> None:
    where = rank.device()
    ddp.init(device=where)
    training = Training(where)
    pinned = where.type != "cpu"
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned) for each in training.tensors]

    def copy() -> None:
        for into, tensor in zip(copies, training.tensors, strict=True):
            into.copy_(tensor, non_blocking=True)

    state = elastic.State(model=training.model, optimizer=training.optimizer, step=0)
    state.resume()
    for _slot in range(6):  # until commits are overlapped, and each slot is there and pinned
        state.commit()
    state.flush()
    theirs: dict[str, list[float]] = {"held up": [], "steps": []}
    ours: dict[str, list[float]] = {"held up": [], "steps": []}
    figures: dict[str, list[float]] = {"complete": [], "copy to pinned memory": [], "a step": []}
    with tempfile.TemporaryDirectory() as folder:
        saving = AsyncSave(training, folder)
        saving.save()
        saving.wait()
        for _round in range(_ROUNDS):
            theirs["held up"].append(held_up(training, saving.save, saving.wait))
            ours["held up"].append(held_up(training, state.commit, state.flush))
            rank.synchronize()
            theirs["steps"].append(timed_ms(lambda: steps(training, lambda: None)))
            ours["steps"].append(timed_ms(lambda: steps(training, state.commit)))
            state.flush()
            rank.synchronize()
            figures["complete"].append(timed_ms(lambda: (state.commit(), state.flush())))
            figures["copy to pinned memory"].append(timed_ms(copy))
            figures["a step"].append(timed_ms(training.step))
    for name, table, target in (("held up", "commit", 0.1), ("steps", "commit-steps", None)):
        rank.gpu_part.found(
            "comparison",
            table=table,
            name=training.name if name == "held up" else f"{training.name}, {_STEPS} steps",
            unit="ms",
            theirs=theirs[name],
            ours=ours[name],
            target=target,
        )
    for name, values in figures.items():
        rank.gpu_part.found(
            "figure", table="commit", name=f"{training.name}: {name}", unit="ms", values=values, limit=None
        )
    state.close()
    ddp.shutdown()


if __name__ == "__main__":
    main()
