"""What works on macOS, tried on Linux without the names that only Linux has: the service and its commands."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from ports import free_port
from tidy import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parent / "programs" / "as_on_macos.py"


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.Popen(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}, stdout=-1, stderr=-2, text=True
    )


def ran(*words: str) -> tuple[int, str]:
    process = started(*words)
    said, _ = process.communicate(timeout=100)
    return process.returncode, said


def accepts(where: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(where.rpartition(":")[2]))) == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    where = f"127.0.0.1:{free_port()}"
    words = ("serve", "--listen", where, "--store", f"file:{tmp_path / 'state'}")
    process = started("rendezvous.main", *words)
    eventually(lambda: accepts(where), what=f"a service at {where}")
    yield where
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said


def test_every_module_of_the_service_can_be_imported() -> None:
    code, said = ran("all", "rendezvous", "ddp_launch_wings.etcd")
    assert code == 0, said
    assert "rendezvous.service.server" in said
    assert "ddp_launch_wings.etcd.owner" in said


def test_the_service_answers_ddpctl(service: str) -> None:
    code, said = ran("rendezvous.control.ctl", "--rendezvous", service, "--timeout", "60", "list")
    assert code == 0, said


def test_a_secret_is_made_and_read(tmp_path: Path) -> None:
    assert ran("rendezvous.main", "secret", str(tmp_path / "job.pem"))[0] == 0
    assert "PRIVATE KEY" in (tmp_path / "job.pem").read_text()


def test_the_launcher_says_that_it_runs_on_linux() -> None:
    code, said = ran("launcher", "--nproc-per-node", "1", "train.py")
    assert code == 2
    assert said.count("\n") == 1
    assert "Linux" in said
    assert ran("launcher", "--version")[0] == 0
