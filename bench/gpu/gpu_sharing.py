"""Part `sharing`: how two NCCL ranks share one card. Each way is tried by all-reduces; the first that works is used.

The theory is in gpu_part.py.
"""

from __future__ import annotations

import gpu_part
from gpu_ranks import RanksFailed, run_ranks

_LIMIT_S = 45.0


def main() -> None:
    if gpu_part.DEVICE != "cuda":
        gpu_part.not_run("on CPUs any number of ranks get on with each other")
    for mode in gpu_part.SHARING_ENV:
        why = tried(mode)
        gpu_part.found("sharing", mode=mode, works=not why, detail=why)
        if not why:
            return
    gpu_part.not_run("this NCCL does not permit several ranks on one card; LIBNCCL= names a newer one")


def tried(mode: str) -> str:
    """Why it does not work, or ""."""
    env = {"NCCL_DEBUG": "WARN", "GPU_SHARING": mode, "GPU_CARDS": "1", **gpu_part.SHARING_ENV[mode]}
    try:
        run_ranks("collectives.py", 2, "all_reduce", timeout_s=_LIMIT_S, env=env)
    except RanksFailed as failure:
        return str(failure)[-600:]
    return ""


if __name__ == "__main__":
    main()
