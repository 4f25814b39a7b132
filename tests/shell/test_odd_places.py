"""Jobs where an installation is read-only or another user's, and where folders and limits are not as usual."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tidy import ROOT

from launcher.output.log_file import LogFolder
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_a_full_folder_for_temporary_files_is_passed_over",
        "::test_without_home_and_with_a_folder_whose_path_no_socket_could_have",
    )
)

PLAIN = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
TRAINS = """
import torch, ddp
place = ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(8, 1))
model(torch.randn(4, 8)).sum().backward()
print("rank", place.rank, "of", place.world_size, place.backend)
ddp.shutdown()
"""
FULL = "mount -t tmpfs -o size=40m none /mnt && head -c 64m /dev/zero > /mnt/full 2>/dev/null; export TMPDIR=/mnt; "
NO_SHM = "mount -t tmpfs -o ro none /dev/shm; "


@functools.cache
def may_mount() -> bool:
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def job(script: Path, *words: str) -> str:
    return shlex.join([sys.executable, "-m", "launcher", "--nproc-per-node", "2", *words, str(script)])


def ran(shell: str, folder: Path, *wrapper: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [*wrapper, "sh", "-c", shell],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_both_ranks(done: subprocess.CompletedProcess[str], words: str = "of 2") -> None:
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} {words}" in done.stdout


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    return script


@pytest.fixture
def trains(tmp_path: Path) -> Path:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    return script


def test_without_home_and_with_a_folder_whose_path_no_socket_could_have(plain: Path, tmp_path: Path) -> None:
    """`ran` passes no HOME."""
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    assert_both_ranks(ran(job(plain, "--no-warm-start"), tmp_path, TMPDIR=str(folder)))


@pytest.mark.skipif(not may_mount(), reason="cannot mount file systems here")
def test_a_full_folder_for_temporary_files_is_passed_over(plain: Path, tmp_path: Path) -> None:
    done = ran(FULL + job(plain, "--no-warm-start"), tmp_path, "unshare", "--mount")
    assert_both_ranks(done)
    assert "/mnt" in done.stderr


@NIGHTLY
@pytest.mark.skipif(not may_mount(), reason="cannot mount file systems here")
@pytest.mark.parametrize(
    "before",
    [
        FULL,
        "mount -t tmpfs -o size=100k none /mnt; export TMPDIR=/mnt; ",
        "mount -t tmpfs -o size=100m,nr_inodes=1 none /mnt; export TMPDIR=/mnt; ",
        "mount -t tmpfs -o size=100m,noexec none /mnt; export TMPDIR=/mnt; ",
        NO_SHM,
        NO_SHM + 'export TMPDIR="$PWD/$(printf %0150d 0)"; mkdir "$TMPDIR"; ',
        "ulimit -n 256; ",
    ],
    ids=["full", "tiny", "no inodes", "noexec", "no shm", "long path", "few files"],
)
def test_a_job_trains_over_shared_memory(before: str, trains: Path, tmp_path: Path) -> None:
    assert_both_ranks(ran(before + job(trains), tmp_path, "unshare", "--mount"), "of 2 shm")


@NIGHTLY
@pytest.mark.skipif(not may_mount(), reason="cannot mount file systems here")
def test_no_place_for_temporary_files_is_one_line(tmp_path: Path) -> None:
    before = "for each in /tmp /var/tmp; do mount -t tmpfs -o ro none $each; done; cd /proc; "
    words = [sys.executable, "-m", "launcher", "--nproc-per-node", "1", "--no-python", "true"]
    done = ran(before + shlex.join(words), tmp_path, "unshare", "--mount")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "TMPDIR" in done.stderr


@NIGHTLY
@pytest.mark.skipif(not may_mount(), reason="only root can become another user")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no Python that all users may run")
def test_an_installation_that_only_its_owner_may_write(plain: Path, tmp_path: Path) -> None:
    """Installed by root for everybody, and run by nobody."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True, timeout=200)  # fmt: skip  # noqa: E501
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", env], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "-q", "--python", env / "bin/python", "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", next(tmp_path.glob("*.whl"))], check=True, timeout=60)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    subprocess.run(["chmod", "-R", "a-w", env], check=True)
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command = [*words, str(env / "bin/ddp-launch"), "--nproc-per-node", "2", str(plain)]
    done = subprocess.run(command, cwd="/", env={}, capture_output=True, text=True, timeout=60, check=False)
    assert_both_ranks(done)


def test_folders_of_ended_jobs_with_the_same_name_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is started anew with its old /tmp has the same job and the same process numbers."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spec = LaunchSpec(EntryPoint(EntryKind.PROGRAM, "true"), JobSpec("train"))
    folders = [LogFolder(spec).path for _ in range(6)]
    assert {os.path.dirname(folder) for folder in folders} == {str(tmp_path)}
    assert len(set(folders)) == 6
