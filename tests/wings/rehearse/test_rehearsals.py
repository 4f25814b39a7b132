"""`ddp-launch rehearse` with real scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

WITHIN_S = 600.0  # several jobs one after the other, on a machine that may be busy
pytestmark = pytest.mark.timeout(WITHIN_S + 60.0)

_HEAD = """
import os, torch, ddp
from torch import nn
from ddp import elastic
place = ddp.init()
torch.manual_seed(1)
model = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def train_step(step, inputs):
    loss = model(inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if place.rank == 0:
        ddp.log({"loss": loss.item()}, step=step)
    return loss.item()
"""
LOSSY = f"""{_HEAD}
data, first = torch.randn(96, 4), 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 12):
    loss = train_step(step, data[8 * step : 8 * step + 8])
    if place.rank == 0:
        with open("log.csv", "a") as file:
            file.write(f"{{step}},{{loss}}\\n")
        if step % 4 == 3:
            torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}}, "new.pt")
            os.replace("new.pt", "last.pt")
ddp.shutdown()
"""
KEPT = f"""{_HEAD}
def row(step, metrics):
    with open("log.csv", "a") as file:
        file.write(f"{{step}},{{metrics['loss']}}\\n")

state = elastic.State(model=model, optimizer=optimizer, step=0, on_step=row)

def train():
    while state.step < 12:
        loss = train_step(state.step, torch.randn(8, 4))
        state.step += 1
        state.commit(metrics={{"loss": loss}})

state.run(train)
state.close()
ddp.shutdown()
"""


def rehearse(folder: Path, source: str, *words: str, ranks: str = "2") -> tuple[int, dict[str, Any], str]:
    (folder / "train.py").write_text(source)
    command = [os.path.join(os.path.dirname(sys.executable), "ddp-launch"), "rehearse", "--out", "report"]
    command += [*words, "--nproc-per-node", ranks, "--max-restarts", "2", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode in (0, 1), done.stderr
    assert (folder / "report" / "report.json").exists(), done.stderr
    return done.returncode, json.loads((folder / "report" / "report.json").read_text()), done.stdout


def test_a_generator_that_is_not_kept_is_named(tmp_path: Path) -> None:
    code, found, said = rehearse(tmp_path, LOSSY, "--play", "kill", "--at-step", "7")
    (played,) = found["faults"]
    assert (code, found["undisturbed"]["verdict"], played["verdict"]) == (1, "same", "differs"), said
    assert played["lost_steps"] == 2
    assert played["first_difference"] == {"step": 5, "rank": 0, "what": ["torch"]}
    assert "in the state of step 1 again: a new process sets its seed anew (train.py:6)" in said
    assert "log.csv has 2 rows more than once" in said
    assert "(written at train.py:28)" in said
    assert "<svg" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.nightly(
    instead=("::test_a_generator_that_is_not_kept_is_named", "wings/rehearse/test_comparison.py")
)
def test_a_state_loses_nothing(tmp_path: Path) -> None:
    (folder := tmp_path / "Ann's runs").mkdir()
    (own := folder / "notes" / "best.txt").parent.mkdir()
    own.write_text("mine")
    (log := folder / "log.csv").write_text("of another day")
    ends = 'with open("notes/best.txt", "a") as file:\n    file.write("more")\nos._exit(0)\n'
    code, found, said = rehearse(folder, KEPT + ends, "--play", "kill", "--seed", "3", "--compare", "log.csv")
    assert (own.read_text(), log.read_text()) == ("mine", "of another day")
    assert not (folder / "report/kill/work/log.csv").read_text().startswith("of")
    (played,) = found["faults"]
    assert played["restart_s"], "the seconds by part"
    assert (code, played["verdict"], played["lost_steps"]) == (0, "same", 0), said
    assert "no difference: logged values, files and weights at the end" in said


@pytest.mark.nightly(instead="::test_a_generator_that_is_not_kept_is_named")
@pytest.mark.parametrize("fault", ["kill-0", "freeze", "slow", "nan", "disk", "sigterm"])
def test_each_fault_of_one_node_is_played(tmp_path: Path, fault: str) -> None:
    _code, found, said = rehearse(tmp_path, KEPT, "--play", fault)
    if os.geteuid() != 0 and fault == "disk":
        assert found["not_played"], said
        return
    (played,) = found["faults"]
    assert played["exit_code"] == 0, said
    if fault in ("nan", "sigterm"):  # a State without a folder ends with the job
        assert played["verdict"] == "differs", said
    else:
        assert (played["verdict"], played["lost_steps"]) == ("same", 0), said


@pytest.mark.nightly(instead="::test_a_generator_that_is_not_kept_is_named")
@pytest.mark.parametrize("fault", ["node", "freeze-node", "network"])
def test_each_fault_of_two_nodes_is_played(tmp_path: Path, fault: str) -> None:
    """The generators of a node are lost with it."""
    _code, found, said = rehearse(tmp_path, KEPT, "--play", fault, "--nnodes", "2", ranks="1")
    if os.geteuid() != 0 and fault == "network":
        assert found["not_played"], said
        return
    (played,) = found["faults"]
    assert (played["exit_code"], played["lost_steps"]) == (0, 0), said


@pytest.mark.nightly(instead="::test_a_generator_that_is_not_kept_is_named")
@pytest.mark.parametrize(
    "words",
    [("minimal.py",), ("train_elastic.py", "--epochs", "1", "--samples", "640"), ("train_accelerate.py",)],
)
def test_the_examples_lose_nothing_that_they_keep(tmp_path: Path, words: tuple[str, ...]) -> None:
    script, *arguments = words
    examples = os.path.join(os.path.dirname(__file__), "..", "..", "..", "examples")
    command = [os.path.join(os.path.dirname(sys.executable), "ddp-launch"), "rehearse", "--out", "report"]
    command += ["--play", "kill", "--nproc-per-node", "2", "--max-restarts", "2"]
    done = subprocess.run(
        [*command, os.path.join(examples, script), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    (played,) = found["faults"]
    assert (done.returncode, played["verdict"]) == (0, "same"), done.stdout
    assert (played["lost_steps"] == 0) is (script != "minimal.py"), done.stdout
