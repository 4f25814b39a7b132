"""Reduces on and on; once the benchmark's folder has the mark "lost", it is after the loss: one reduction, and done.

The launchers count restarts differently when it is another node that failed, so the attempt is told by the mark.
"""

import os

FOLDER = os.path.dirname(os.environ["BENCH_STAMPS"])
AFTER = os.path.exists(os.path.join(FOLDER, "lost"))
os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(AFTER))

from stamp import stamp, wait_at_gate  # noqa: E402

stamp("line")  # before torch is imported, where it has to be

import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def die_when_told() -> None:
    wait_at_gate()
    with open(os.path.join(FOLDER, "lost"), "w"):
        pass
    stamp("kill")
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
stamp("reduced")
if not AFTER:
    if sys.argv[1] == "rank" and dist.get_rank() == dist.get_world_size() - 1:
        threading.Thread(target=die_when_told, daemon=True).start()
    while True:
        dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
