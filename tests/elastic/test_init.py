"""`ddp.init()`: from what the launcher says, or alone; once; and mistakes in words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from launched import Launched

if TYPE_CHECKING:
    from pathlib import Path

# Everything that one process alone can be asked, in one process: torch takes its time to load.
ALONE = """
import datetime, json, os, pytest, torch, torch.distributed as dist
import ddp

place = ddp.init()
assert place == ddp.Place(0, 1, 0, 1, 0, torch.device("cpu"), place.backend), place
assert place.backend in ("shm", "gloo")
assert ddp.init() is place, "it is made once"
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [1, 1, 1]
listening = []
open_files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
mine = {os.readlink(path) for path in open_files if os.path.islink(path)}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            listening.append(words[1].partition(":")[0])
assert set(listening) <= {"0100007F"}, f"reached from outside: {listening}"
with pytest.raises(ddp.InitError, match=r"shutdown\\(\\)"):
    ddp.init("gloo", timeout=3)
ddp.shutdown()
assert not dist.is_initialized()
ddp.shutdown()

place = ddp.init("cpu:gloo", device="cpu", timeout=datetime.timedelta(seconds=7))
assert place.device.type == "cpu"
ddp.shutdown()

os.environ["DDP_BACKEND"] = "cpu:gloo"
assert ddp.init().backend == "cpu:gloo"
ddp.shutdown()
with pytest.raises(ddp.InitError, match="'gluu'.*gloo"):
    ddp.init("gluu")
with pytest.raises(ddp.InitError, match="timeout='0'"):
    ddp.init(timeout=0)
os.environ["DDP_TIMEOUT_S"] = "soon"
with pytest.raises(ddp.InitError, match="DDP_TIMEOUT_S='soon'"):
    ddp.init("gloo")
del os.environ["DDP_TIMEOUT_S"], os.environ["DDP_BACKEND"]
if not torch.cuda.is_available():
    with pytest.raises(ddp.InitError, match=r"cuda.*ddp.init\\(device='cpu'\\)"):
        ddp.init(device="cuda")
os.environ["RANK"] = "0"
with pytest.raises(ddp.InitError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
    ddp.init()
del os.environ["RANK"]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert ddp.init().backend == "gloo", "the script's own group is taken as it is"
with pytest.raises(ddp.InitError, match="'nccl'.*'gloo'"):
    ddp.shutdown()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp.init("nccl")
ddp.shutdown()
print("all of it")
"""

LAUNCHED = """
import json, os, torch, torch.distributed as dist
import ddp
place = ddp.init({asked})
total = torch.tensor([float(place.rank)])
dist.all_reduce(total)
said = [place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank, place.backend]
assert place.rank == dist.get_rank() and place.world_size == dist.get_world_size()
with open(os.environ["THERE"] + f"/{{place.rank}}", "w") as file:
    json.dump([*said, str(place.device), total.item()], file)
ddp.shutdown()
"""


def test_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "all of it\n"), done.stderr


@pytest.mark.parametrize(
    ("asked", "env", "backends"),
    [
        ("", {}, {"shm", "gloo"}),
        pytest.param("", {"DDP_NATIVE": "0"}, {"gloo"}, marks=pytest.mark.nightly),
        pytest.param("", {"DDP_BACKEND": "gloo"}, {"gloo"}, marks=pytest.mark.nightly),
        pytest.param("'gloo', timeout=50", {"DDP_BACKEND": "fake"}, {"gloo"}, marks=pytest.mark.nightly),
    ],
)
def test_launched(tmp_path: Path, asked: str, env: dict[str, str], backends: set[str]) -> None:
    job = Launched(tmp_path / "job", "--nproc-per-node", "2", source=LAUNCHED.format(asked=asked), env=env)
    try:
        assert job.wait(100) == 0, job.stderr()
        for rank in (0, 1):
            *said, backend, device, total = json.loads((job.there / str(rank)).read_text())
            assert said == [rank, 2, rank, 2, 0]
            assert backend in backends
            assert (device, total) == ("cpu", 1.0)
    finally:
        job.clean_up()
