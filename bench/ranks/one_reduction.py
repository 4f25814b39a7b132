"""The smallest distributed script: torch, a process group, one all-reduce, a clean exit."""

import torch
import torch.distributed as dist
from stamp import stamp

stamp("torch")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
stamp("reduced")
dist.destroy_process_group()
