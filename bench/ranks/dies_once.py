"""Trains on; in the first attempt the last rank kills itself while the others wait for it in an all-reduce."""

from stamp import stamp, wait_at_gate

stamp("line")

import os  # noqa: E402
import signal  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
stamp("reduced")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == dist.get_world_size() - 1:
        wait_at_gate()
        stamp("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
