"""Kill -9 at random instants: the state is of one step, and a commit that was complete is never lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "killed_often.py"


def kill(there: Path, seed: int, kills: int) -> dict[str, int]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(there), str(seed), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + kills)
    assert done.returncode == 0, done.stderr
    met: dict[str, int] = json.loads(done.stdout)
    assert met["before the resume"] + met["while it trains"] == kills
    return met


def test_some_kills(tmp_path: Path) -> None:
    met = kill(tmp_path, seed=1, kills=60)
    assert all(met.values()), met


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_2000_kills(tmp_path: Path, seed: int) -> None:
    met = kill(tmp_path, seed, kills=200)
    assert all(met.values()), met
