"""Ranks to try the backends with: real processes, forked from a server that has imported torch, told what to run.

A crew runs functions of the modules here, the same on all its ranks, and hands back what each returned. A rank that
was killed, or does not answer in time, is said to be gone; the crew is then good for nothing more.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "ddp.shm", "crew"])
ANSWER_WITHIN_S = 150.0
SOON_S = 30.0  # a tenth of a second where nothing else runs, and half of any timeout of a group


@dataclass(frozen=True)
class Raised:
    kind: str
    text: str
    after_s: float
    trace: str


@dataclass(frozen=True)
class Gone:
    rank: int


class Crew:
    def __init__(self, size, backend="shm", env=(), timeout_s=60.0):
        """`env`: one dictionary for each rank, or none."""
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = FORK_SERVER.Pipe()
            settings = {"GLOO_SOCKET_IFNAME": "lo", **(env[rank] if env else {})}
            arguments = (rank, size, backend, self._folder.name, theirs, settings, timeout_s)
            process = FORK_SERVER.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.close)
        started = [self._answer(rank) for rank in range(size)]
        self.problems = [each for each in started if isinstance(each, Raised | Gone)]

    @property
    def pids(self):
        return [process.pid for process in self._processes]

    def tell(self, function, *args, ranks=None):
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(OSError):
                self._pipes[rank].send((function, args))

    def answers(self, ranks=None):
        return [self._answer(rank) for rank in (range(self.size) if ranks is None else ranks)]

    def run(self, function, *args):
        """What all ranks returned; an exception in one of them is one here."""
        self.tell(function, *args)
        answers = self.answers()
        wrong = [(rank, each) for rank, each in enumerate(answers) if isinstance(each, Raised | Gone)]
        wrong.sort(key=lambda pair: getattr(pair[1], "after_s", 0))
        assert not wrong, "\n".join(f"rank {rank}: {getattr(each, 'trace', each)}" for rank, each in wrong)
        return answers

    def kill(self, rank):
        os.kill(self.pids[rank], signal.SIGKILL)

    def _answer(self, rank):
        pipe = self._pipes[rank]
        try:
            return pipe.recv() if pipe.poll(ANSWER_WITHIN_S) else Gone(rank)
        except (EOFError, OSError):
            return Gone(rank)

    def close(self):
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _serve(rank, size, backend, folder, pipe, settings, timeout_s):
    os.environ.update(settings)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    import torch
    import torch.distributed as dist

    import ddp.shm  # noqa: F401  # the server may be another test's, which imported other things
    from ddp.groups import core_loading

    core_loading.native.cache_clear()  # the server has asked before DDP_NATIVE was set
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: collections leave it alone
    store = dist.FileStore(os.path.join(folder, "store"), size)

    def join():
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )

    pipe.send(_outcome(join, ()))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        pipe.send(_outcome(function, args))
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    os._exit(0)


def _outcome(function, args):
    began = time.monotonic()
    try:
        return function(*args)
    except BaseException as error:
        return Raised(type(error).__name__, str(error), time.monotonic() - began, traceback.format_exc())
