"""The examples run as their texts say. Those that need large packages run nightly, where the packages are installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTLY = pytest.mark.nightly(instead=("::test_minimal", "shell/test_launch_function.py"))

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = Path(sys.executable).with_name("ddp-launch")


def run(tmp_path: Path, *words: str, ranks: int = 2) -> str:
    done = subprocess.run(
        [str(LAUNCH), "--nproc-per-node", str(ranks), str(EXAMPLES / words[0]), *words[1:]],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loss_in(text: str) -> float:
    return float(re.findall(r"loss ([\d.]+)", text)[-1])


def test_minimal(tmp_path: Path) -> None:
    said = run(tmp_path, "minimal.py")
    assert "world size 2" in said
    assert loss_in(said) < 1e-3


@pytest.mark.nightly(
    instead=("::test_minimal", "contract/ddp_like_torch/test_torchs_own.py::test_under_distributed_autograd")
)
def test_embeddings_on_a_parameter_server(tmp_path: Path) -> None:
    said = run(tmp_path, "train_rpc.py", "--steps", "40", ranks=4)
    first, last = map(
        float, re.findall(r"2 trainers, 40 steps, loss ([\d.]+) at first and ([\d.]+)", said)[0]
    )
    assert last < 0.7 * first
    assert "the dense layers of all trainers are the same" in said


@pytest.mark.nightly(instead="::test_minimal")
def test_gpt_learns_from_generated_text(tmp_path: Path) -> None:
    said = run(tmp_path, "train_gpt.py", "--steps", "40", "--batch", "8")
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.85 * losses[0]


@NIGHTLY
def test_accelerate(tmp_path: Path) -> None:
    said = run(tmp_path, "train_accelerate.py")
    assert "world size 2" in said
    assert loss_in(said) < 1


def cells() -> list[str]:
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    return ["".join(each["source"]) for each in book["cells"] if each["cell_type"] == "code"]


@NIGHTLY
def test_the_cells_of_the_notebook_run_in_their_order(tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells()))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 has trained" in done.stdout
    assert done.stdout.splitlines()[-1] == "DDP-5004 1"


@NIGHTLY
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    assert "world size 2, steps 20" in run(tmp_path, "train_lightning.py")


@NIGHTLY
def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = run(tmp_path, "train_transformers.py")
    assert "world size 2" in said
    assert loss_in(said) < 4


@NIGHTLY
def test_the_notebook_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output["text"]
        for cell in book.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream" and output["name"] == "stdout"
    ]
    assert any("rank 1 of 2 has trained" in text for text in shown)
    assert shown[-1].endswith("DDP-5004 1\n")
