"""Ranks that live long and run many programs, under one class.

They are forked from a process that has imported torch. Each program has a process group of its own, which costs a few
milliseconds: what an earlier program left in flight cannot reach a later one. A rank that waits for a peer that has
ended its program is stuck; so is one that does not come further for some seconds. Then all ranks are killed, and the
next program gets new ones.

Only time in which the machine lets the ranks run counts as time without progress: see `Patience`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from drawn_program import Program

_LIMIT = timedelta(days=1)  # of the groups: the crew itself decides when a rank is stuck


@dataclass(frozen=True)
class Stuck:
    """In the place of records: the operation in which a rank did not come further, or died."""

    at: int
    died: bool = False


class Crew:
    """`kind`: "ours", or else torch's class."""

    def __init__(self, kind: str, world: int) -> None:
        self.kind, self.world = kind, world
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def begin(self, program: Program) -> None:
        self._tell(program)
        if not self._processes:
            self._start()
            self._tell(program)

    def end(self, patience: float) -> list[Any]:
        """-> for each rank its records, or `Stuck`. `patience`: seconds without any progress."""
        answers: list[Any] = [None] * self.world
        last, waited = self._places(answers), Patience(self._processes)
        while any(answer is None for answer in answers):
            waiting = {self._pipes[i]: i for i in range(self.world) if answers[i] is None}
            for pipe in multiprocessing.connection.wait(list(waiting), 0.05):
                answers[waiting[pipe]] = _received(pipe, self._at[waiting[pipe]])
            if (here := self._places(answers)) != last:
                last, waited = here, Patience(self._processes)
            if waited.seconds() > (patience / 3 if _has_failed(answers) else patience):
                answers = [answer or Stuck(self._at[i]) for i, answer in enumerate(answers)]
        if any(isinstance(answer, Stuck) for answer in answers):
            self.close()
        else:
            self._tell(None)  # all have ended: the group may go
        return answers

    def _tell(self, what: Program | None) -> None:
        """A rank that has answered may have died: a thread of Gloo's ends the process if a late message is wrong."""
        try:
            for pipe in self._pipes:
                pipe.send(what)
        except ConnectionError:
            self.close()

    def _places(self, answers: list[Any]) -> tuple[Any, ...]:
        return (*self._at, *(answer is None for answer in answers))

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        preload = ["torch", "torch.distributed.optim", "torch._dynamo", "torch.testing"]
        context.set_forkserver_preload(preload)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, _LIMIT, wait_for_workers=False)
        self._at: Any = context.RawArray("i", [-9] * self.world)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(self.kind, rank, self.world, self._store.port, theirs, self._at),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:  # however long it takes: a rank that dies ends its pipe
            pipe.recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


class Patience:
    """The time since its construction without the time in which the ranks were ready to run and got no CPU."""

    def __init__(self, processes: list[Any]) -> None:
        self._processes = processes
        self._began = self._now()

    def seconds(self) -> float:
        return counted(*(now - then for now, then in zip(self._now(), self._began, strict=True)))

    def _now(self) -> tuple[float, float, float]:
        """-> the time, the CPU time of all threads of the ranks, and how long they have waited for a CPU."""
        used = delayed = 0
        for process in self._processes:
            for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # the thread has ended
                    on_cpu, ready, _ = thread.read_text().split()
                    used, delayed = used + int(on_cpu), delayed + int(ready)
        return time.monotonic(), used / 1e9, delayed / 1e9


def counted(elapsed: float, used: float, delayed: float) -> float:
    """The seconds of waiting, of which the machine is no cause. A rank may also wait by running: `used`."""
    return max(used, elapsed - delayed)


def _has_failed(answers: list[Any]) -> bool:
    """Whether a rank has raised: then the others probably wait for it, for ever."""
    return any("raised" in answer[-1] for answer in answers if isinstance(answer, list))


def _received(pipe: Any, at: int) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return Stuck(at, died=True)


def _serve(kind: str, rank: int, world: int, port: int, pipe: Any, at: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR", DDP_HOST_KEY=f"host{rank}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    store = dist.TCPStore("127.0.0.1", port, None, False, _LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_LIMIT)
    gc.collect()
    gc.freeze()  # what was imported stays: collections leave it alone
    pipe.send("ready")
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            _run(kind, rank, pipe, at)


def _run(kind: str, rank: int, pipe: Any, at: Any) -> None:
    from program_run import Run

    program = pipe.recv()

    def reached(i: int) -> None:
        at[rank] = i

    reached(-8)
    group = dist.new_group(backend=_backend(kind, program.backend), timeout=_LIMIT)
    run = Run(program, rank, _class(kind), group, reached)
    pipe.send(run.all())
    pipe.recv()
    del run
    gc.collect()
    dist.destroy_process_group(group)


def _backend(kind: str, backend: str) -> str:
    if kind != "ours" or backend == "gloo":
        return "gloo"
    import ddp.groups.shm

    # The ranks of `hier` are on a host each, those of `shm` on one.
    os.environ["DDP_HOST_KEY"] = f"host{dist.get_rank()}" if backend == "hier" else "host"
    assert ddp.groups.shm
    return backend


def _class(kind: str) -> Any:
    if kind != "ours":
        return torch.nn.parallel.DistributedDataParallel
    import ddp

    return ddp.DistributedDataParallel
