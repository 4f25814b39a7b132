"""A part `fault-NAME`: plays one case of gpu_cases.py in a real job, and reports the verdict and the times.

gpu_play.py NAME
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import gpu_part
from gpu_cases import BY_NAME

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("tests/shell", "tests/lab", "bench/faults")]

import fault_table  # noqa: E402
from fault_play import play  # noqa: E402

# Between the hosts of the lab NCCL has only sockets, and each host has a name of its own.
_LAB_ENV = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def main() -> None:
    case = BY_NAME[sys.argv[1]]
    ranks = case.ranks * case.nodes
    if gpu_part.DEVICE != "cuda":
        case = replace(case, backend=gpu_part.BACKEND, device=gpu_part.DEVICE)
    elif case.in_lab:
        os.environ.update(_LAB_ENV)
    elif why := gpu_part.why_not_ranks(ranks):
        gpu_part.not_run(why)
    os.environ.update({} if case.in_lab else gpu_part.sharing_env(ranks))
    played = play(case)
    if played.skipped:
        gpu_part.not_run(played.skipped)
    print(played)
    gpu_part.found(
        "fault",
        name=case.name,
        setting=case.where,
        injected=case.injected,
        verdict=fault_table.what_was_said(played),
        correct=fault_table.judged(played),
        collective_s=played.took_s,
        step_s=played.step_s,
    )


if __name__ == "__main__":
    main()
