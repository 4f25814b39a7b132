"""A job with nothing to do: its ranks have met, and sleep."""

import torch
import torch.distributed as dist
from stamp import stamp, wait_at_gate

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
stamp("reduced")
wait_at_gate()
dist.destroy_process_group()
