"""The parts `reducer-*`: starts the ranks of a program that measures and reports.

gpu_reducer.py PROGRAM RANKS [WORD ...]
"""

from __future__ import annotations

import os
import sys

import gpu_part
from gpu_ranks import run_ranks


def main() -> None:
    program, ranks, *words = sys.argv[1:]
    if why := gpu_part.why_not_ranks(int(ranks)):
        gpu_part.not_run(why)
    limit_s = float(os.environ.get("GPU_SECONDS", "60")) * 2  # the command stops it before
    run_ranks(program, int(ranks), *words, timeout_s=limit_s)


if __name__ == "__main__":
    main()
