"""The how-to pages of the site: their commands and their Python, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from how_tos import commands, pages, python
from launched import make_fake_torch
from page_player import ABOUT_JOBS, play

# What the reader trains: it needs no torch, so that each command takes a second.
SHORT = 'import os\nprint("rank", os.environ["RANK"])\n'
# It shows its steps until it is stopped.
LONG = """
import time
from ddp.telemetry import status_page as s
for step in range(1, 6000):
    s.page().mark(s.FORWARD)
    print("step", step, flush=True)
    time.sleep(0.1)
    s.page().step()
"""
SCRIPTS = {"ddpctl": LONG}
WITH_TORCH = ("install", "launch", "preflight")
NIGHTLY = ("elastic", "elastic-reference", "preflight", "warm-pool")  # each takes more than ten seconds


def cases(found: list[Path]) -> list[object]:
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.nightly] * (page.stem in NIGHTLY))
        for page in found
    ]


@pytest.mark.parametrize("page", cases([page for page in pages() if commands(page)]))
def test_its_commands(page: Path, tmp_path: Path) -> None:
    fake = {} if page.stem in WITH_TORCH else {"PYTHONPATH": make_fake_torch(tmp_path)}
    play(page, tmp_path, {"train.py": SCRIPTS.get(page.stem, SHORT)}, fake)


@pytest.mark.parametrize("page", cases([page for page in pages() if python(page)]))
def test_its_python(page: Path, tmp_path: Path) -> None:
    here = Path(__file__).parent
    words = [sys.executable, "-m", "launcher", "--nproc-per-node", "1", str(here / "snippets.py"), str(page)]
    found = os.pathsep.join((str(here), str(here.parent / "quality")))
    env = {name: value for name, value in os.environ.items() if not name.startswith(ABOUT_JOBS)}
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=env | {"PYTHONPATH": found, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran ") == len(python(page))
