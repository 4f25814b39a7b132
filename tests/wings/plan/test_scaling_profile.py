"""`ddp-launch plan` with real scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_STEPS_MS = 20
SCRIPT = f"""
import time
import torch
from torch import distributed, nn

distributed.init_process_group("gloo")
torch.manual_seed(0)


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep({_STEPS_MS / 1000})
        return gradient


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(1 << 10)) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = Asleep.apply(x + part.sum())
        return x


model = nn.parallel.DistributedDataParallel(Layers())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.zeros(1)).sum().backward()
    optimizer.step()
"""


def plan(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    command = [os.path.join(os.path.dirname(sys.executable), "ddp-launch"), "plan", *words]
    return subprocess.run([*command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_script_is_profiled_and_ended(tmp_path: Path) -> None:
    done = plan(
        tmp_path,
        SCRIPT.replace("STEPS", "10**6"),
        *("--nodes", "1,2,1000", "--link", "10gbit", "--steps", "5", "--ranks-per-node", "2", "--json"),
        *("--save-profile", "saved.json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["profile"]["bytes"] == 3 * 4096
    # Each gradient waits for its layer: the first one for none, the last one for two.
    assert 2 * _STEPS_MS / 1000 <= found["profile"]["backward_s"] <= found["profile"]["compute_s"] < 1.0
    assert [world["ranks"] for world in found["worlds"]] == [2, 4, 2000]
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [nbytes for nbytes, _ in saved["gradients"]] == [4096] * 3
    assert len(saved["step_samples"]) == 2 * 5
    assert len(saved["inside"]) > 3
    again = plan(tmp_path, "", "--profile", "saved.json", "--nodes", "4")
    assert again.returncode == 2  # the script would not run
    command = [os.path.join(os.path.dirname(sys.executable), "ddp-launch"), "plan", "--profile", "saved.json"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "efficiency" in shown.stdout


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("raise SystemExit('no data here')", "no data here"),
        pytest.param("print('done')", "fewer than 8 training steps", marks=pytest.mark.nightly),
        pytest.param(SCRIPT.replace("STEPS", "6"), "fewer than 8 training steps", marks=pytest.mark.nightly),
    ],
)
def test_a_script_without_enough_steps_is_named(tmp_path: Path, script: str, expected: str) -> None:
    done = plan(tmp_path, script, "--nodes", "2")
    assert done.returncode == 1
    assert "train.py" in done.stderr
    assert expected in done.stderr
    assert "[DDP-4008]" in done.stderr
    assert "Traceback" not in done.stderr
