"""Each benchmark runs to its end and fills its place in the page with figures.

One of them runs with every `make test`; most of the others start torch several times.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

NIGHTLY = pytest.mark.nightly(instead="::test_cluster")

BENCH = Path(__file__).parents[2] / "bench"
ONCE = ("--rounds", "1")
BOTH = (*ONCE, "--warm-up", "0", "--timeout", "100")  # of those that run both launchers side by side
SMALL = ("--models", "MLP, 1M")


def page_of(name: str, folder: Path, words: Sequence[str], marks: Sequence[str] = ()) -> str:
    """The page that it wrote its tables into; `marks`: their places, if not one of its name."""
    page = folder / "page.md"
    places = [f"<!-- {mark}:begin -->\nold\n<!-- {mark}:end -->\n" for mark in marks or (name,)]
    page.write_text(f"above\n{''.join(places)}below\n")
    command = [sys.executable, str(BENCH / f"{name}.py"), *words, "--write-docs", str(page)]
    command += ["--plot", str(folder / "chart.png")] if "--warm-up" in words else []  # else into docs/img
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    return text


@NIGHTLY
@pytest.mark.parametrize(
    ("name", "words", "row"),
    [
        ("launch", (*BOTH, "--ranks", "1"), "| command has exited |"),
        ("restart", (*BOTH, "--parts", "death", "--train-for", "0"), "0 without a figure"),
        ("recovery", (*BOTH, "--node-rounds", "0", "--parts", "death"), "first all-reduce of the next"),
        ("agent", (*BOTH, "--seconds", "0.2"), "| agent"),
        ("allreduce", (*BOTH, "--ranks", "2", "--sizes", "4", "65536"), "| 64 KB |"),
        ("checkpoints", (*BOTH, "--gb", "0.02", "--shardings", "FSDP2"), "| 0.02 GB, FSDP2 | ddp.elastic |"),
        ("ddp", (*BOTH, "--ranks", "2", *SMALL, "--parts", "steps"), "| MLP, 1M |"),
        ("logical", (*ONCE, "--worlds", "2", *SMALL), "| MLP, 1M | 2 |"),
        ("marked", (*ONCE, *SMALL), "| MLP, 1M |"),
        ("silent", ONCE, "| `--recover in-place` |"),
        ("hierarchical", (*ONCE, "--rates", "1gbit", *SMALL, "--sizes", "65536"), "| 1gbit | MLP, 1M |"),
        ("status_page", (*ONCE, "--blocks", "2", "--calls", "100"), "| a collective entered |"),
        ("rendezvous", (*BOTH, "--sizes", "4", "--stores", "memory", "--seconds", "1"), "0 without a figure"),
        ("plan", ("--hosts", "2", "--ranks-each", "1", *SMALL, "--rates", "1gbit"), "| 2 x 1 | 1gbit |"),
    ],
)
def test_it_measures(name: str, words: tuple[str, ...], row: str, tmp_path: Path) -> None:
    assert row in page_of(name, tmp_path, words)


@NIGHTLY
@pytest.mark.parametrize(
    ("name", "words", "marks", "row"),
    [
        (
            "restart",
            (*BOTH, "--parts", "steps", "--jobs", "mlp ours"),
            ("restart-steps",),
            "| MLP, our DDP |",
        ),
        (
            "overhead",
            ("--launches", "1", "--rounds", "2", *SMALL, "--kinds", "torch DDP", "--ranks", "2"),
            ("overhead-mlp",),
            "| MLP, 1M, torch DDP, 2 ranks |",
        ),
        (
            "control_plane",
            ("--sizes", "8", "--kills", "1", "--seconds", "0.5"),
            ("control-plane",),
            "2 kills: 0 decisions lost, 0 doubled, 0 other problems.",
        ),
    ],
)
def test_it_measures_parts(
    name: str, words: tuple[str, ...], marks: tuple[str, ...], row: str, tmp_path: Path
) -> None:
    assert row in page_of(name, tmp_path, words, marks)


@NIGHTLY
def test_paper(tmp_path: Path) -> None:
    """A figure of real ranks on two hosts, a curve, and a predicted one."""
    chosen = ("loss", "hooks", "scale")
    words = ("--figures", *chosen, *ONCE, "--pictures", str(tmp_path))
    page = page_of("paper", tmp_path, words, tuple(f"paper-{name}" for name in chosen))
    assert page.count("Machine:") == 3


def test_cluster(tmp_path: Path) -> None:
    page = page_of("cluster", tmp_path, ("--nodes", "3", "--ranks", "2", "--seconds", "0.2"))
    share = re.search(r"\| agent, CPU over 0\.2 s \| ([0-9.]+) % \|", page)
    assert share is not None
    assert float(share[1]) < 100


@NIGHTLY
def test_a_run_that_hangs_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    """Far too short a bound: both launchers are cut off in the middle, and the table says so."""
    words = (*ONCE, "--warm-up", "0", "--timeout", "0.3", "--parts", "death", "--train-for", "0")
    command = [sys.executable, str(BENCH / "restart.py"), *words, "--plot", str(tmp_path / "chart.png")]
    env = {**os.environ, "BENCH_SMOKE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    for launcher in ("torchrun", "ddp-launch"):
        assert f"{launcher} 1 runs, 1 without a figure (1 of them hung)" in done.stdout
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert process.environ().get("BENCH_SMOKE") != str(tmp_path)
