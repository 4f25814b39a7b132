"""What runs in a rank of the pool: receive a task, run it under a process group of its own, answer what was seen."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import random
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transcript import Transcript


def serve(number: int, world_size: int, port: int, pipe: Any, said: str) -> None:
    with open(said, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.enable()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    # What is there now stays, and so does what tasks import: a collection after each task then costs next to nothing.
    gc.collect()
    gc.freeze()
    # A group outlives its task by one turn: were a callback in one of its own threads the last to let go of it, the
    # thread would have to wait for itself, and the process would end.
    outliving: list[Any] = []
    while True:
        try:
            turn, task = pipe.recv()
        except EOFError:
            return
        print(f"--- {turn} {task.module}.{task.function} {task.side}", file=sys.stderr, flush=True)
        pipe.send(_carry_out(task, number, world_size, dist.PrefixStore(str(turn), store), outliving))


def _carry_out(task: Any, number: int, world_size: int, store: Any, outliving: list[Any]) -> Transcript:
    import torch
    import torch.distributed as dist
    from trial import Trial

    torch.manual_seed(number)
    random.seed(number)
    timeout = timedelta(seconds=task.group_timeout_s)
    if task.backend == "shm":
        importlib.import_module("ddp.shm")
    dist.init_process_group(task.backend, store=store, rank=number, world_size=world_size, timeout=timeout)
    outliving[:-1] = []
    outliving.append(dist.group.WORLD)
    trial = Trial(number, world_size, task.side)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            body = getattr(importlib.import_module(task.module), task.function)
            try:
                body(trial, *task.arguments)
            except Exception as error:
                trial.failed(error)
            trial.warned(warned)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)
        gc.collect()
        gc.freeze()
    return trial.transcript()
