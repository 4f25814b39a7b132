"""A job without a launcher: ranks that are started again, all of them, when one has died.

Each rank is forked from a process that has imported torch and FSDP, which all jobs share: under the launcher, each job
would import them for itself. What the library is promised by a launcher is here as well: the variables, a folder that
outlives the ranks, a store for each generation.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
from ports import free_port

from ddp.groups import joining

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.optim", "ddp.elastic"])
_WITHIN_S = 200.0


def play(
    program: Path,
    folder: Path,
    nproc: int,
    restarts: int,
    env: Mapping[str, str],
    within_s: float = _WITHIN_S,
) -> list[int]:
    """The exit codes of the last generation: negative for a signal, as subprocess has them."""
    scratch = folder / "scratch"
    scratch.mkdir(mode=0o700)
    shared = {"DDP_SCRATCH": str(scratch), "TORCHELASTIC_RUN_ID": folder.name, **env}
    codes: list[int] = []
    for generation in range(1, restarts + 2):
        codes = _generation(program, folder, nproc, shared | {"DDP_GENERATION": str(generation)}, within_s)
        if not any(codes):
            break
    return codes


def _generation(
    program: Path, folder: Path, nproc: int, env: Mapping[str, str], within_s: float
) -> list[int]:
    world = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    ranks: list[Any] = []
    for rank in range(nproc):
        variables = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        said = folder / f"rank{rank}"
        ranks.append(FORK_SERVER.Process(target=run_rank, args=(str(program), variables, str(said))))
        ranks[-1].start()
    give_up_at = time.monotonic() + within_s
    running = {rank.sentinel: rank for rank in ranks}
    try:
        while running and not any(rank.exitcode for rank in ranks):
            ended = wait(list(running), max(0.0, give_up_at - time.monotonic()))
            assert ended, f"still running: {sorted(rank.name for rank in running.values())}"
            for sentinel in ended:
                running.pop(sentinel).join()  # type: ignore[call-overload]
    finally:
        for rank in running.values():
            rank.kill()
        for rank in ranks:
            rank.join()
    return [rank.exitcode for rank in ranks]


def run_rank(program: str, variables: Mapping[str, str], said: str) -> None:
    with open(said, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(variables)
    joining.install()  # as the launcher does: the fork server imported the library before
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
