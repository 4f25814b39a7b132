"""A process that its cgroup has frozen is told apart from one that sleeps."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import eventually

from launcher.health.pages import is_frozen
from launcher.template.cgroup import folders as folders_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_FREEZE = {"cgroup.freeze": ("1", "0"), "freezer.state": ("FROZEN", "THAWED")}  # versions 2 and 1


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture(params=_FREEZE)
def freezer(request: pytest.FixtureRequest, sleeper: subprocess.Popen[bytes]) -> Iterator[Path]:
    """The file that freezes, in a new cgroup of one version."""
    folder = _made(request.param)
    if folder is None:
        pytest.skip(f"no cgroup here has a {request.param} that may be written")
    yield folder / request.param
    (folder / request.param).write_text(_FREEZE[request.param][1])
    sleeper.kill()
    sleeper.wait()
    eventually(lambda: _removed(folder), what="the cgroup is empty")


def _made(file: str) -> Path | None:
    for parent in folders_of("self", "freezer"):
        folder = Path(parent) / f"frozen-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / file).exists():
                return folder
            folder.rmdir()
    return None


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def test_only_while_it_is_frozen(sleeper: subprocess.Popen[bytes], freezer: Path) -> None:
    freeze, thaw = _FREEZE[freezer.name]
    (freezer.parent / "cgroup.procs").write_text(str(sleeper.pid))
    assert not is_frozen(sleeper.pid)
    freezer.write_text(freeze)
    eventually(lambda: is_frozen(sleeper.pid), what="it is frozen")
    freezer.write_text(thaw)
    eventually(lambda: not is_frozen(sleeper.pid), what="it is thawed")
    sleeper.kill()
    sleeper.wait()
    assert not is_frozen(sleeper.pid)
