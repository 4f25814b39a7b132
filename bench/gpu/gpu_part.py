"""What a part of `make gpu` is told, and how it reports. The process of a part and its ranks import this module.

A part is a process of its own. Its environment says on which device it works (`GPU_DEVICE`; in a rehearsal `cpu`, or
`emu`, the emulated accelerator of tests/accelerator), how ranks share a card (`GPU_SHARING`), and whether it only
rehearses (`GPU_REHEARSAL`). It appends what it finds to a file, one JSON object a line, so that what was found is kept
when the part breaks or its time is over.

Several ranks on one card
-------------------------
NCCL refuses two ranks on one card. There are two ways around this:

- `multi-rank`: NCCL 2.30 and later permit it with NCCL_MULTI_RANK_GPU_ENABLE=1.
- `host-ids`: each rank gives a host name of its own to NCCL (NCCL_HOSTID). NCCL then takes the ranks for ranks on
  different hosts, and connects them by sockets.

In both the processes take turns on the card, so a collective takes milliseconds. That is enough for tests and faults;
times of training steps with several ranks on one card say little about ranks that have a card each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = os.path.join(ROOT, "bench", "gpu", "programs")
NOT_RUN = 3  # exit code of a part that cannot run here; it has reported why

DEVICE = os.environ.get("GPU_DEVICE", "cuda")
IS_REHEARSAL = os.environ.get("GPU_REHEARSAL", "") == "1"
SHARING = os.environ.get("GPU_SHARING", "")
CARDS = int(os.environ.get("GPU_CARDS", "1"))
BACKENDS = {"cuda": "nccl", "cpu": "gloo", "emu": "cpu:gloo,emu:eccl"}
BACKEND = BACKENDS[DEVICE]
# When the part should have its figures; its time limit comes later.
DEADLINE = time.monotonic() + float(os.environ.get("GPU_SECONDS", "60"))

SHARING_ENV: dict[str, dict[str, str]] = {
    "multi-rank": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"},
    "host-ids": {
        **{"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},
        **{"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"},
    },
}


def found(kind: str, **values: object) -> None:
    """Report something. `kind` is one of those of gpu_results.py."""
    line = json.dumps({"kind": kind, **values})
    path = os.environ.get("GPU_FINDINGS")
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")
    print(line, flush=True)


def not_run(why: str) -> NoReturn:
    found("not run", why=why)
    sys.exit(NOT_RUN)


def why_not_ranks(ranks: int) -> str:
    """Why so many ranks cannot use NCCL here, or "" if they can."""
    if DEVICE != "cuda" or ranks <= CARDS or SHARING in SHARING_ENV:
        return ""
    cards = "one GPU" if CARDS == 1 else f"{CARDS} GPUs"
    return f"{ranks} ranks need as many GPUs, or an NCCL that permits several ranks on one. Here is {cards}"


def sharing_env(ranks: int, mode: str = SHARING) -> dict[str, str]:
    """What the environment of a job needs if its ranks share cards."""
    if DEVICE != "cuda" or ranks <= CARDS:
        return {}
    return SHARING_ENV.get(mode, {})


def place(rank: int, local_rank: int, ranks: int) -> str:
    """The device of a rank, which calls this before it creates a process group."""
    if DEVICE == "cpu":
        return "cpu"
    if DEVICE == "emu":
        sys.path.insert(0, os.path.join(ROOT, "tests", "accelerator"))
        import emu  # noqa: F401  registers the device with torch
    if ranks > CARDS and SHARING == "host-ids":
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    return f"{DEVICE}:{local_rank % CARDS}"
