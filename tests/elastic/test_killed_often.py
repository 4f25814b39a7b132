"""Kill -9 at random instants: the state is of one step, and a commit that was complete is never lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from object_store import CREDENTIALS, s3_server

NIGHTLY = pytest.mark.nightly(
    instead=("::test_some_kills", "elastic/test_object_stores.py", "elastic/test_lying_stores.py")
)

PROGRAM = Path(__file__).parent / "programs" / "killed_often.py"


def kill(there: Path, seed: int, kills: int, folder: str = "", env: dict[str, str] | None = None) -> None:
    words = [str(there), str(seed), str(kills), folder or str(there / "commits")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=100 + 5 * kills,
        env=os.environ | (env or {}),
    )
    assert done.returncode == 0, done.stderr
    met: dict[str, int] = json.loads(done.stdout)
    assert met["in the resume"] + met["in a write"] + met["while it trains"] >= kills
    assert all(met[what] for what in met if kills >= 60 or what != "while it trains"), met


def kill_at_an_object_store(there: Path, seed: int, kills: int) -> None:
    """The store outlives the process, with the uploads that it has begun."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is in requirements/test.txt")
    with s3_server() as port:
        address = f"http://127.0.0.1:{port}"
        s3fs.S3FileSystem(
            endpoint_url=address, key="anybody", secret="anything", skip_instance_cache=True
        ).mkdir("bucket")
        kill(there, seed, kills, "s3://bucket/run", CREDENTIALS | {"AWS_ENDPOINT_URL": address})


def test_some_kills(tmp_path: Path) -> None:
    kill(tmp_path, seed=1, kills=20)


@NIGHTLY
@pytest.mark.timeout(1200)  # on a busy machine
@pytest.mark.parametrize("seed", range(10))
def test_2000_kills(tmp_path: Path, seed: int) -> None:
    kill(tmp_path, seed, kills=200)


@NIGHTLY
@pytest.mark.timeout(1200)  # on a busy machine
@pytest.mark.parametrize("seed", range(10))
def test_2000_kills_at_an_object_store(tmp_path: Path, seed: int) -> None:
    kill_at_an_object_store(tmp_path, seed, kills=200)
