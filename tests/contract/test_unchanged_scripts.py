"""Whole scripts, as their authors wrote them for torchrun."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest
from side_by_side import PLAIN, WARM, ddp_launch, script

if TYPE_CHECKING:
    from pathlib import Path

_ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean()
        accelerator.print(f"epoch {epoch} loss {mean.item():.4f} on {accelerator.num_processes}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""


@pytest.mark.nightly(instead="unchanged/test_programs.py")
def test_accelerate_trains(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script(tmp_path, _ACCELERATE)
    ended = ddp_launch("train.py", cwd=tmp_path, nproc=2).ok()
    losses = [float(loss) for loss in re.findall(r"loss (\S+) on 2", ended.out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 4


_OUR_BACKEND = """
import torch.distributed as dist
dist.init_process_group("shm")
"""


def test_a_backend_of_ours_that_is_not_registered_comes_with_a_hint(tmp_path: Path) -> None:
    script(tmp_path, _OUR_BACKEND)
    ended = ddp_launch("train.py", cwd=tmp_path)
    assert ended.code == 1
    assert "Unknown backend type shm" in ended.err
    assert ended.err.count("import ddp.shm") == 2  # in the output of the rank, and in the box


_LOUD = """
import sys
for number in range(200_000):
    print(number, "x" * 40)
sys.stdout.write("y" * 3_000_000 + "\\n")
sys.stdout.write("no newline at the end")
"""


@pytest.mark.parametrize(
    "options", [pytest.param(WARM, id="warm"), pytest.param(PLAIN, id="plain", marks=pytest.mark.nightly)]
)
def test_much_output_arrives_whole(options: tuple[str, ...], light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, _LOUD.replace("print(", "sys.stdout.write('%s %s\\n' % (").replace("40)", "40))"))
    expected = "".join(f"{number} {'x' * 40}\n" for number in range(200_000))
    expected += "y" * 3_000_000 + "\nno newline at the end"
    logs = tmp_path / "logs"
    ddp_launch(
        "train.py", cwd=tmp_path, options=[*options, "-r", "3", "--log-dir", str(logs)], env=light
    ).ok()
    (log,) = logs.rglob("stdout.log")
    digest = hashlib.sha256(log.read_bytes()).hexdigest()
    assert digest == hashlib.sha256(expected.encode()).hexdigest()
