"""Parts `collectives` and `like-torch`: a program on several ranks that ends well only if all it computes is right.

gpu_checks.py PROGRAM RANKS ...
"""

from __future__ import annotations

import sys

import gpu_part
from gpu_ranks import RanksFailed, run_ranks

_LIMIT_S = 80.0


def main() -> None:
    program, *numbers = sys.argv[1:]
    ran = 0
    why = ""
    for ranks in map(int, numbers):
        if why := gpu_part.why_not_ranks(ranks):
            print(why)
            continue
        name = f"{program}, {ranks} rank{'s' * (ranks > 1)}"
        try:
            run_ranks(f"{program}.py", ranks, timeout_s=_LIMIT_S)
        except RanksFailed as failure:
            gpu_part.found("check", name=name, ok=False, detail=str(failure))
        else:
            gpu_part.found("check", name=name, ok=True, detail="")
        ran += 1
    if not ran:
        gpu_part.not_run(why)


if __name__ == "__main__":
    main()
