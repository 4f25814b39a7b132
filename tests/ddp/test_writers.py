"""What a script gives to TensorBoard, W&B and MLflow arrives, and these work as without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.health.pages import Pages

# What the launcher does in a rank after the import of torch; then a step of an optimizer.
TRAIN = """
import os, sys
import torch
from launcher.template import script_start
script_start.load()()
def step():
    weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()
step()
"""

# Packages with the names, and the classes through which all numbers pass.
STAND_INS = {
    "wandb/__init__.py": "from wandb.sdk.wandb_run import Run\nlog = Run().log\n",
    "wandb/sdk/__init__.py": "",
    "wandb/sdk/wandb_run.py": """
class Run:
    def log(self, data, step=None, commit=None):
        return self._log(data=data, step=step, commit=commit)
    def _log(self, data, step=None, commit=None):
        if "refused" in data: raise ValueError("refused")
        return data
""",
    "mlflow/__init__.py": "",
    "mlflow/tracking/__init__.py": "",
    "mlflow/tracking/client.py": """
class Metric:
    def __init__(self, key, value, step): self._key, self._value, self._step = key, value, step
class MlflowClient:
    def log_metric(self, run_id, key, value, timestamp=None, step=None): pass
    def log_batch(self, run_id, metrics=(), params=(), tags=()): pass
""",
}


def run(
    pages: Pages,
    folder: Path,
    source: str,
    python: str = sys.executable,
    libraries: Sequence[Path] = (),
    *,
    is_launched: bool = True,
) -> tuple[list[Any], str]:
    """What has arrived, and what it has printed."""
    folder.mkdir(exist_ok=True)
    path = [folder, Path(__file__).parents[2], *libraries]
    env = os.environ | pages.open(0, 0) | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [
        python,
        "-c",
        (TRAIN if is_launched else TRAIN.replace("script_start.load()()", "pass")) + source,
    ]
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ddp: " not in done.stderr, done.stderr
    return [json.loads(line) for _, line in pages.values()[1]], done.stdout


def test_numbers_are_read_and_nothing_else_is_touched(pages: Pages, tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source = """
assert not any(name.startswith(("wandb", "mlflow", "tensorboard")) for name in sys.modules)
import numpy, wandb
from mlflow.tracking.client import Metric, MlflowClient
step()
class Odd(float):
    def __float__(self): raise AssertionError("code of the program")
data = {"loss": 0.5, "a": numpy.float32(2), "n": 3, "text": "x", "t": torch.zeros(1), "c": numpy.complex64(1),
        "odd": Odd(1), 5: 1.0, "huge": 10**400}
run = wandb.Run()
assert wandb.log(data, step=7) is data
assert run.log({}) == {}
try: run.log({"refused": 1.0}); raise AssertionError
except ValueError: pass
try: run.log()
except TypeError as error: assert "data" in str(error)
MlflowClient().log_metric("id", "acc", 0.25, step=3)
MlflowClient().log_metric("id", key="acc", value=torch.zeros(1))
MlflowClient().log_batch("id", metrics=[Metric("f1", 0.75, 4), Metric("em", 1.0, 4)])
if os.fork() == 0:
    run.log({"child": 1.0}); os._exit(0)
os.wait()
"""
    assert run(pages, tmp_path, source)[0] == [
        [7, {"loss": 0.5, "a": 2.0, "n": 3.0}],
        [2, {"refused": 1.0}],
        [3, {"acc": 0.25}],
        [4, {"f1": 0.75, "em": 1.0}],
    ]


WRITERS = """
from torch.utils.tensorboard import SummaryWriter
import wandb, mlflow
board = SummaryWriter("board")
run = wandb.init(mode="offline", project="p", dir=".")
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
mlflow.set_tracking_uri("file:./mlruns")
mlflow.start_run()
step()
board.add_scalar("a", torch.tensor(0.5), 1)
board.add_scalar("b", 0.25, 2, new_style=True)
board.add_scalars("c", {"train": 1.0, "val": 2.0}, 3)
board.add_text("t", "text", 4); board.add_histogram("h", torch.zeros(3), 4)
wandb.log({"d": 0.5, "nested": {"e": 1.0}}, step=5)
run.log({"e": 0.75}, step=6)
mlflow.log_metric("f", 1.5, step=7)
mlflow.log_metrics({"g": 2.5, "h": 3.5}, step=8)
try: board.add_scalar("bad", "no number"); print("board: no error")
except Exception as error: print("board:", type(error).__name__)
try: wandb.log(5); print("wandb: no error")
except Exception as error: print("wandb:", type(error).__name__)
board.close(); wandb.finish(); mlflow.end_run()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
seen = EventAccumulator("board").Reload()
print(sorted(seen.Tags()["scalars"]), [e.value for e in seen.Scalars("a")])
print(sorted(os.listdir("mlruns/0")[:1] and [m for _, _, files in os.walk("mlruns/0") for m in files if m in "fgh"]))
"""


@pytest.mark.nightly(instead="::test_numbers_are_read_and_nothing_else_is_touched")
def test_the_real_packages(pages: Pages, tmp_path: Path) -> None:
    """They print and write the same without us; all plain numbers arrive."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env/bin/python")
    command = [python, "-m", "pip", "install", "-q", "tensorboard", "wandb", "mlflow-skinny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {done.stderr[-300:]}")
    folders = [Path(sysconfig.get_path("purelib"))]
    found, printed = run(pages, tmp_path, WRITERS, python, folders)
    assert found == [
        *([1, {"a": 0.5}], [2, {"b": 0.25}], [3, {"c_train": 1.0}], [3, {"c_val": 2.0}]),
        *([5, {"d": 0.5}], [6, {"e": 0.75}], [7, {"f": 1.5}], [8, {"g": 2.5, "h": 3.5}]),
    ]
    assert printed == run(pages, tmp_path / "without", WRITERS, python, folders, is_launched=False)[1]
