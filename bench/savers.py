"""Those that save and restore the state of a training, each behind the same four calls, for bench/checkpoints.py.

`open` prepares what a training has after its first checkpoints. `save` returns how long the training thread waits
(stall), and how long until the checkpoint is written: with all files synced (durable), or without (written). `resume`
returns how long it takes to have the state again. `close` frees everything.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor

from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Figures = dict[str, float]  # milliseconds


class Subject:
    """What is saved."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, is_replicated: bool) -> None:
        self.model, self.optimizer, self.is_replicated = model, optimizer, is_replicated
        self._sums = self.sums()

    def dictionaries(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 0}

    def forget(self) -> None:
        """Otherwise a resume that does nothing would look fast."""
        with torch.no_grad():
            for each in self._some():
                each.zero_()

    def check(self) -> None:
        assert self.sums() == self._sums, "the state is not what was saved"

    def sums(self) -> list[float]:
        """Of the first and the last parameter, and what the optimizer has of them."""
        return [_local(each).sum().item() for each in self._some()]

    def _some(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        found: list[torch.Tensor] = []
        for parameter in (parameters[0], parameters[-1]):
            found += [parameter, self.optimizer.state[parameter]["exp_avg"]]
        return found

    def load(self, found: dict[str, Any]) -> None:
        states.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )


class Saver(Protocol):
    def open(self) -> None: ...
    def save(self) -> Figures: ...
    def resume(self) -> Figures: ...
    def close(self) -> None: ...


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long the slowest rank takes."""
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    taken = torch.tensor([(time.perf_counter() - begin) * 1e3])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item(), result


class Ours:
    """A commit into memory with each step, and every third one to disk: one is measured that goes to both."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._named = {"model": subject.model, "optimizer": subject.optimizer, "step": 0}
        self._subject = subject
        self._folder = folder
        self._state: Any = None

    def _new(self) -> Any:
        return elastic.State(**self._named, folder=self._folder, disk_every=3, keep=1)

    def open(self) -> None:
        self._state = self._new()
        self._state.resume()
        for _slot in range(2):  # the first commit into each slot asks the kernel for its memory
            self._state.commit()

    def save(self) -> Figures:
        stall, _nothing = timed(self._state.commit)
        rest, _nothing = timed(self._state.flush)
        return {"stall": stall, "durable": stall + rest}

    def resume(self) -> Figures:
        """From memory, as after a restart of the ranks; then from disk alone."""
        dead = self._state
        dead._forget_leaving()
        dead._keeper = dead._team = None
        del dead
        self._state = self._new()
        memory, found = timed(self._state.resume)
        assert found.in_memory
        self._subject.check()
        self._subject.forget()
        self._state.close()  # removes the memory
        self._state = self._new()
        disk, found = timed(self._state.resume)
        assert not found.in_memory
        return {"memory": memory, "disk": disk}

    def close(self) -> None:
        self._state.close()
        self._state = None
        _remove(self._folder)


class Dcp:
    """As its tutorial has it. Its cache of the copy in memory needs an accelerator."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._subject, self._folder = subject, folder
        self._group = dist.new_group(backend="gloo")  # its thread uses it while the ranks use another one

    def open(self) -> None:
        self._writer = dcp.FileSystemWriter(
            self._folder, cache_staged_state_dict=torch.accelerator.is_available()
        )

    def save(self) -> Figures:
        stall, future = timed(self._begin)
        rest, _nothing = timed(future.result)
        return {"stall": stall, "durable": stall + rest}

    def _begin(self) -> Any:
        found = self._subject.dictionaries()
        return dcp.async_save(found, storage_writer=self._writer, process_group=self._group)

    def resume(self) -> Figures:
        def load() -> None:
            found = self._subject.dictionaries()
            dcp.load(found, checkpoint_id=self._folder)
            self._subject.load(found)

        self._writer = None
        return {"disk": timed(load)[0]}

    def close(self) -> None:
        _remove(self._folder)


class Nvrx:
    """The local checkpoints of NVRx, in the background; it forks a process that writes, and does not sync.

    It is made for CUDA. So the class of its state dictionaries is one of ours, which copies tensors of the CPU, and its
    waits for the GPU do nothing.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda *_: None
            torch.cuda.current_device = lambda: "cpu"
        self._subject, self._folder = subject, folder
        self._manager_class, self._queue_class = local_manager.LocalCheckpointManager, AsyncCallsQueue
        self._iteration = 0

    def open(self) -> None:
        self._manager = self._manager_class(self._folder)
        self._queue = self._queue_class(persistent=False)  # the other kind cannot send its routines

    def save(self) -> Figures:
        self._iteration += 1
        stall, _nothing = timed(self._begin)
        rest, _nothing = timed(lambda: self._queue.maybe_finalize_async_calls(blocking=True))
        return {"stall": stall, "written": stall + rest}

    def _begin(self) -> None:
        from host_state_dict import HostStateDict

        request = self._manager.save(
            HostStateDict(self._subject.dictionaries()), self._iteration, is_async=True
        )
        self._queue.schedule_async_request(request)

    def resume(self) -> Figures:
        def load() -> None:
            manager = self._manager_class(self._folder)
            assert manager.find_latest() == self._iteration
            found, _id = manager.load()
            self._subject.load(found.state_dict)

        return {"memory": timed(load)[0]}

    def close(self) -> None:
        self._queue.close()
        _remove(self._folder)


class Torchsnapshot:
    def __init__(self, subject: Subject, folder: Path) -> None:
        from torchsnapshot import Snapshot

        self._snapshot = Snapshot
        self._folder = folder
        self._app = {"model": subject.model, "optimizer": subject.optimizer}
        self._replicated = ["**"] if subject.is_replicated else []

    def open(self) -> None:
        """Nothing is kept from one snapshot to the next."""

    def save(self) -> Figures:
        stall, pending = timed(
            lambda: self._snapshot.async_take(str(self._folder), self._app, replicated=self._replicated)
        )
        rest, _nothing = timed(pending.wait)
        return {"stall": stall, "written": stall + rest}

    def resume(self) -> Figures:
        return {"disk": timed(lambda: self._snapshot(str(self._folder)).restore(self._app))[0]}

    def close(self) -> None:
        _remove(self._folder)


def _remove(folder: Path) -> None:
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


_KNOWN: dict[str, tuple[Callable[[Subject, Path], Saver], str]] = {
    "ddp.elastic": (Ours, "ddp"),
    "DCP async_save": (Dcp, "torch"),
    "NVRx local": (Nvrx, "nvidia_resiliency_ext"),
    "torchsnapshot": (Torchsnapshot, "torchsnapshot"),
}


def installed(subject: Subject, folder: Path, memory: Path) -> dict[str, Saver]:
    """Those whose package is there. `memory`: a folder for those that keep their files in memory."""
    found = {}
    for name, (make, package) in _KNOWN.items():
        if importlib.util.find_spec(package) is not None:
            found[name] = make(subject, (memory if make is Nvrx else folder) / package)
    return found
