"""Jobs on the emulated accelerator: what the launcher, ddp.init, commits and the status page make of such a device.

The device comes as that of a vendor does: torch loads it itself, by an entry point of an installed package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import emu_build
import pytest

from launcher.health.pages import Pages
from rendezvous.values.rank_view import RankPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launched import Launch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has the device."""
    try:
        emu_build.built()
    except emu_build.CannotBuild as why:
        pytest.skip(str(why))
    package = tmp_path / "installed" / "emu-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: emu\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nemu = emu:autoload\n")
    return {"PYTHONPATH": os.pathsep.join(map(str, (HERE, package.parent, ROOT)))}


# Dropout draws on the device. What comes of two generations must be what one would have come to.
INTERRUPTED = """
import json, os, signal
import emu, torch
from torch import nn
import ddp
from ddp import elastic

def fresh(place):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.3), nn.Tanh(), nn.Linear(24, 2)).to(place.device)
    torch.manual_seed(10 + place.rank)
    model = ddp.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def step_of(model, optimizer, place, step):
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + place.rank)).to(place.device)
    model(x).square().mean().backward()
    optimizer.step()

place = ddp.init()
generation = int(os.environ["DDP_GENERATION"])
model, optimizer = fresh(place)
state = elastic.State(model=model, optimizer=optimizer, step=0)
resumed = state.resume()
with emu.slow(kernels=0.0005, collectives=0.003):
    while state.step < 8:
        step_of(model, optimizer, place, state.step)
        state.step += 1
        state.commit()
        if generation == 1 and place.rank == 1 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
alone, its_optimizer = fresh(place)
for step in range(8):
    step_of(alone, its_optimizer, place, step)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
with open(os.path.join(os.environ["THERE"], str(place.rank)), "w") as file:
    index = torch.accelerator.current_device_index()
    json.dump([str(place.device), place.backend, index, resumed.in_memory, same], file)
state.close()
ddp.shutdown()
"""


def test_a_job_goes_on_from_its_commits_there(launch: Launch, installed: dict[str, str]) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preload", "torch._dynamo")
    job = launch(*words, source=INTERRUPTED, env=installed)
    assert job.wait(100) == 0, job.stderr()
    for rank in (0, 1):
        said = json.loads((job.there / str(rank)).read_text())
        assert said == [f"emu:{rank}", "cpu:gloo,emu:eccl", rank, True, True]
    assert "warm start is not possible" not in job.stderr()


MARKED = """
import torch, torch.distributed as dist
import ddp
place = ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(6, 2).to(place.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dist.all_reduce(torch.ones(3, dtype=torch.float64, device=place.device))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 6, device=place.device)).sum().backward()
    optimizer.step()
ddp.status("has trained")
"""


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close_all()


def test_the_status_page_shows_a_step_there(pages: Pages, installed: dict[str, str]) -> None:
    env = dict(os.environ) | pages.open(0, 0) | installed
    done = subprocess.run([sys.executable, "-c", MARKED], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    view = pages.ended(0)
    assert view is not None
    assert (view.step, view.message, view.error) == (3, "has trained", "")
    assert {RankPhase.FORWARD, RankPhase.BACKWARD} <= {phase for phase, _ in view.phase_times}
    assert view.buckets is not None
    assert (view.buckets.of, view.buckets.launched, view.buckets.finished) == (1, 1, 1)
    first = next(each for each in view.collectives if each.dtype == "float64")
    assert (first.op, first.numel) == ("all_reduce", 3)
    assert not view.waiting_in
