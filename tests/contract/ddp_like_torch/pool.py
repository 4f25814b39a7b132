"""Ranks that live long: cases are sent to them, what they saw comes back.

A case costs a new process group (20 ms), not new processes. The ranks are forked from a process that has imported
torch and done nothing else, so a pool that had to be killed is back within a second. What one case does to its ranks
stays with that case: it has a group of its own, and a rank that dies or does not answer costs the whole pool its
life before the next case runs.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rank
import torch.distributed as dist

if TYPE_CHECKING:
    from transcript import Transcript

# What a case imports on its way: paid for once, before the ranks are forked.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.optim", "torch.testing"]
LINES_OF_A_DEAD_RANK = 30


class RanksLost(AssertionError):
    """A rank died, or did not answer in time."""


@dataclass(frozen=True)
class Task:
    """What every rank does next: `function(trial, *arguments)`, looked up by its names."""

    module: str
    function: str
    side: str = "torch"
    arguments: tuple[Any, ...] = ()
    group_timeout_s: float = 60.0
    backend: str = "gloo"


class Pool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._tasks_given = 0
        self._ranks: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))

    def run(self, task: Task, timeout_s: float = 180.0) -> list[Transcript]:
        """What each rank saw. Raises RanksLost, and starts anew next time, if one does not say."""
        if not self._ranks:
            self._start()
        self._tasks_given += 1
        try:
            for pipe in self._pipes:
                pipe.send((self._tasks_given, task))
            return self._answers(time.monotonic() + timeout_s)
        except (OSError, EOFError) as error:
            raise RanksLost(self._last_words(task, "a rank died")) from error
        except TimeoutError as error:
            raise RanksLost(self._last_words(task, str(error))) from error

    def _answers(self, deadline: float) -> list[Transcript]:
        answers: dict[int, Transcript] = {}
        while len(answers) < self.world_size:
            silent = {self._pipes[r]: r for r in range(self.world_size) if r not in answers}
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer from ranks {sorted(silent.values())}")
            answers.update((silent[pipe], pipe.recv()) for pipe in ready)
        return [answers[r] for r in range(self.world_size)]

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for number in range(self.world_size):
            ours, theirs = context.Pipe()
            said = str(self._folder / f"rank{number}")
            arguments = (number, self.world_size, self._store.port, theirs, said)
            process = context.Process(target=rank.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)

    def _last_words(self, task: Task, what: str) -> str:
        self.close()
        said = [(path.name, path.read_text(errors="replace")) for path in self._folder.iterdir()]
        ends = ["\n".join([name, *text.splitlines()[-LINES_OF_A_DEAD_RANK:]]) for name, text in sorted(said)]
        return "\n".join([f"{task.module}.{task.function} ({task.side}): {what}", *ends])

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []

    def forget(self) -> None:
        shutil.rmtree(self._folder)


_POOLS: dict[int, Pool] = {}


def pool_of(world_size: int) -> Pool:
    return _POOLS.setdefault(world_size, Pool(world_size))


def close_all() -> None:
    for pool in _POOLS.values():
        pool.close()
        pool.forget()
    _POOLS.clear()
