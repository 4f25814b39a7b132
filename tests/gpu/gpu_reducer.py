"""The parts `reducer-*` and `hooks`: starts the ranks of a program that measures and reports.

gpu_reducer.py PROGRAM RANKS [WORD ...]        RANKS may be a list, 2,1: the first number that can run here
"""

from __future__ import annotations

import os
import sys

import gpu_part
from gpu_ranks import run_ranks


def main() -> None:
    program, numbers, *words = sys.argv[1:]
    why = ""
    for ranks in map(int, numbers.split(",")):
        why = gpu_part.why_not_ranks(ranks)
        if not why:
            limit_s = float(os.environ.get("GPU_SECONDS", "60")) * 2  # the command stops it before
            run_ranks(program, ranks, *words, timeout_s=limit_s)
            return
    gpu_part.not_run(why)


if __name__ == "__main__":
    main()
