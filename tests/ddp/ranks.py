"""Real ranks that outlive a test: a function is sent to them by name, what it returns comes back.

They are forked from a process that has imported torch. Each task has a process group of its own; a rank that does
not answer in time, or dies, costs all of them their life, and the next task gets new ones.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import shutil
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

PATIENCE_S = 120.0


class RankFailed(AssertionError):
    """What a rank raised, as text."""


class Ranks:
    """`backend`: of their process groups. `device`: the module that registers a device with torch, if it is another."""

    def __init__(self, world_size: int, backend: str = "gloo", device: str = "") -> None:
        self._world_size = world_size
        self._with = (backend, device)
        self._tasks = 0
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def __call__(self, function: Callable[..., Any] | str, *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` on all ranks -> what each returned.

        "module.function" is one that only the ranks import.
        """
        module, _, name = function.rpartition(".") if isinstance(function, str) else _name_of(function)
        if not self._processes:
            self._start()
        self._tasks += 1
        store = str(self._folder / f"store{self._tasks}")
        for pipe in self._pipes:
            pipe.send((store, module, name, arguments))
        deadline = time.monotonic() + PATIENCE_S
        answers = [self._answer(rank, pipe, deadline) for rank, pipe in enumerate(self._pipes)]
        if failed := [text for good, text in answers if not good]:
            self.close()
            raise RankFailed("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank: int, pipe: Connection, deadline: float) -> tuple[bool, Any]:
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                answer: tuple[bool, Any] = pipe.recv()
                return answer
        except (EOFError, ConnectionError):
            return False, f"rank {rank} died"
        return False, f"rank {rank} did not answer within {PATIENCE_S} s"

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.optim"])
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world_size, theirs, *self._with), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            shutil.rmtree(self._folder)
        self._processes, self._pipes = [], []


def _name_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    return function.__module__, ".", function.__name__


def _serve(rank: int, world_size: int, pipe: Connection, backend: str, device: str) -> None:
    torch.set_num_threads(1)
    if device:
        importlib.import_module(device)
    gc.freeze()  # what was imported stays: collections leave it alone
    while True:
        try:
            store, module, name, arguments = pipe.recv()
        except EOFError:
            return
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE_S / 2),
        )
        try:
            torch.manual_seed(rank)
            answer = (True, getattr(importlib.import_module(module), name)(rank, *arguments))
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(answer)
        dist.destroy_process_group()


# --- fixtures of the tests ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
