"""The marks on collectives, over process groups that are written in Python and inherit what they do not override."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: marks stay on torch's classes for its whole life.
PROGRAM = """
import sys
import torch, torch.distributed as dist
from ddp.telemetry import collective_marks, status_page

class Inheriting(dist.ProcessGroup):
    def __init__(self, asked):
        super().__init__(asked.group_rank, asked.group_size)
        kinds = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("inner", asked.store), asked.group_rank, asked.group_size)
        self._set_default_backend(kinds.GLOO)
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)

class Deferring(Inheriting):
    def allreduce(self, tensors, opts):
        return super().allreduce(tensors, opts)

    def broadcast(self, tensors, opts):
        return super().broadcast(tensors, opts)

class Noting:
    entered = []
    def __getattr__(self, name):
        return lambda *given: self.entered.append(given[1]) if name == "enter" else 0

# torch keeps the interpreter lock while it enters an inherited method, and Gloo's threads release the tensors of a Work
# while they hold the lock that this method needs. So the two wait for each other without end if a thread of Gloo has
# the last reference to a Work.
kept, wait = [], dist.Work.wait
dist.Work.wait = lambda work, *limit: (kept.append(work), wait(work, *limit))[1]

kind = {"inheriting": Inheriting, "deferring": Deferring}.get(sys.argv[1])
if sys.argv[1] == "shm of the zygote":
    import ddp.shm  # a rank installs its marks after the fork
collective_marks.install(Noting())
if kind is None:
    import ddp.shm
else:
    dist.Backend.register_backend("made_here", lambda asked, _options: kind(asked), extended_api=True, devices=["cpu"])
dist.init_process_group("shm" if kind is None else "made_here", store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(3)
dist.broadcast(t, 0)
dist.all_reduce(t)
dist.all_reduce(t, async_op=True).wait()
dist.all_gather([torch.empty(3)], t)
dist.gather(t, [torch.empty(3)], 0)
dist.scatter(t, [torch.ones(3)], 0)
dist.reduce(t, 0)
dist.reduce_scatter(torch.empty(3), [t])
dist.barrier()
later = [lambda: dist.all_to_all([torch.empty(3)], [t]), lambda: dist.gather_single(torch.empty(3), t, 0)]
for collective in later if hasattr(dist, "gather_single") else later[:1]:
    try:
        collective()
    except RuntimeError as error:
        assert "Backend gloo does not support" in str(error), error
assert t.tolist() == [1.0] * 3
print(" ".join(Noting.entered))
dist.destroy_process_group()
"""

WAY = "broadcast all_reduce all_reduce all_gather gather scatter reduce reduce_scatter barrier all_to_all"


@pytest.mark.parametrize(
    "group",
    [
        "inheriting",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("deferring", "shm", "shm of the zygote")
        ),
    ],
)
def test_each_collective_is_recorded_once(group: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, group], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    entered = done.stdout.splitlines()[-1].split()  # before it, older releases print what Gloo connects
    assert entered[: len(WAY.split())] == WAY.split()
