"""Kill -9 at random instants: the state is of one step, and a commit that was complete is never lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTLY = pytest.mark.nightly(
    instead=("::test_some_kills", "elastic/test_object_stores.py", "elastic/test_lying_stores.py")
)

PROGRAM = Path(__file__).parent / "programs" / "killed_often.py"


def kill(there: Path, seed: int, kills: int) -> None:
    words = [str(there), str(seed), str(kills), str(there / "commits")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=100 + 5 * kills,
    )
    assert done.returncode == 0, done.stderr
    met: dict[str, int] = json.loads(done.stdout)
    assert met["in the resume"] + met["in a write"] + met["while it trains"] >= kills
    assert all(met[what] for what in met if kills >= 60 or what != "while it trains"), met


def test_some_kills(tmp_path: Path) -> None:
    kill(tmp_path, seed=1, kills=10)


@NIGHTLY
@pytest.mark.timeout(1200)  # on a busy machine
@pytest.mark.parametrize("seed", range(10))
def test_2000_kills(tmp_path: Path, seed: int) -> None:
    kill(tmp_path, seed, kills=200)
