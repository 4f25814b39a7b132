"""Ranks that mpirun has started: their place, the backend that goes through mpi4py, and what is said without it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

NIGHTLY = pytest.mark.nightly(instead=("::test_mpirun_says_who_is_who", "::test_the_same_as_over_gloo"))

MPIRUN = shutil.which("mpirun", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])))
RANK = os.path.join(os.path.dirname(__file__), "mpi_rank.py")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun or mpi4py is not here; `make install-test` brings both",
)


def environment(**more: str) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DDP_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", **more}


def run(what: str, folder: Path, *more: str) -> list[Any]:
    """What each of two ranks answered."""
    assert MPIRUN is not None
    command = [MPIRUN, "-n", "2", sys.executable, RANK, what, str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment())
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]


@needs_mpi
@pytest.mark.parametrize(
    ("asked", "backends"),
    [
        ("auto", {"shm", "gloo"}),
        pytest.param("gloo", {"gloo"}, marks=pytest.mark.nightly),
        pytest.param("mpi", {"mpi4py", "mpi"}, marks=pytest.mark.nightly),
    ],
)
def test_mpirun_says_who_is_who(tmp_path: Path, asked: str, backends: set[str]) -> None:
    for rank, (*said, backend, total) in enumerate(run("place", tmp_path, asked)):
        assert said == [rank, 2, rank, 2, 0]
        assert backend in backends
        assert total == [3.0, 3.0, 3.0]


@needs_mpi
@pytest.mark.parametrize("what", ["collectives", pytest.param("training", marks=pytest.mark.nightly)])
def test_the_same_as_over_gloo(tmp_path: Path, what: str) -> None:
    assert run(what, tmp_path) == ["the same", "the same"]


@NIGHTLY
@needs_mpi
def test_what_there_is_not(tmp_path: Path) -> None:
    for said in run("refused", tmp_path):
        assert len(said) == 6
        assert all("mpi4py" in each and "gloo" in each for each in said)


@NIGHTLY
@needs_mpi
def test_a_wait_with_a_limit(tmp_path: Path) -> None:
    (said, total), (_, other) = run("late", tmp_path)
    assert said.startswith("the collective did not complete within 0.2 s")
    assert (total, other) == (2.0, 2.0)


@pytest.mark.nightly(instead="::test_the_same_as_over_gloo")
def test_without_mpi4py(tmp_path: Path) -> None:
    """Both where mpirun has started the script, and where the backend is asked for."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is none')\n")
    for settings, call in (({"PMI_RANK": "0"}, "ddp.init()"), ({}, "ddp.init('mpi4py')")):
        script = f"import ddp\ntry:\n    {call}\nexcept ddp.InitError as error:\n    print(error)"
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment(PYTHONPATH=str(tmp_path), **settings),
        )
        assert "pip install mpi4py" in done.stdout, done.stderr
        assert "pip install mpi" in done.stdout
