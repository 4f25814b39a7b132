"""What the programs of ranks share: the device of this rank, its process group, and the paths of our modules.

A program imports this module first: it sets what NCCL reads before torch is imported.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

_GPU = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BENCH = os.path.join(os.path.dirname(os.path.dirname(_GPU)), "bench")
sys.path[:0] = [_GPU, os.path.join(_BENCH, "ddp_models"), os.path.join(_BENCH, "ranks")]

import gpu_part  # noqa: E402

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PLACE = gpu_part.place(RANK, int(os.environ.get("LOCAL_RANK", "0")), RANKS)
_TIMEOUT = timedelta(seconds=60)


def device() -> Any:
    """This rank's device, made the current one."""
    import torch

    where = torch.device(PLACE)
    if where.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.get_device_module(where.type).set_device(where)
    return where


def join() -> Any:
    """The process group, and the device of this rank."""
    import torch.distributed as dist

    where = device()
    given = {"device_id": where} if where.type == "cuda" else {}  # NCCL connects at once
    dist.init_process_group(gpu_part.BACKEND, timeout=_TIMEOUT, **given)
    return where


def synchronize() -> None:
    import torch

    if PLACE != "cpu":
        torch.get_device_module(torch.device(PLACE).type).synchronize()


def leave() -> None:
    """Without destructors: those of a broken-down CUDA context may wait for good."""
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
