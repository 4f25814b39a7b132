"""What a job and a service leave on disks is for their user alone, whatever the umask."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched import SOON_S
from served import Service
from strangers import made

from ddp.groups import segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launched import Launch

PROGRAM = str(Path(__file__).parent / "programs" / "two_generations.py")
STRANGER = """
import os, socket, sys
knocks = socket.socket(socket.AF_UNIX)
os.setuid(65534)
knocks.connect("\\0" + sys.argv[1])
try:
    knocks.sendall(bytes.fromhex(sys.argv[2]))
    sys.exit(len(knocks.recv(1)))
except (BrokenPipeError, ConnectionResetError):
    pass
"""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def within(folder: Path) -> set[Path]:
    """All files, sockets and folders in it, and itself."""
    return {Path(root) / name for root, folders, files in os.walk(folder) for name in ("", *folders, *files)}


def open_to_others(paths: set[Path]) -> dict[str, str]:
    """Links lead where they lead; what was removed meanwhile is open to nobody."""
    found: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & OTHERS:
                found[str(path)] = stat.filemode(mode)
    return found


def test_what_a_job_leaves_is_its_users(launch: Launch, tmp_path: Path, open_umask: None) -> None:
    """Logs, records, the folder in memory, and the socket in it: while it runs, after a failure, and at the end."""
    logs = tmp_path / "logs"
    job = launch("--nproc-per-node", "2", "--log-dir", str(logs), "-t", "3", "--max-restarts", "1", PROGRAM)
    job.await_there("trains-1")
    scratch = {Path(p) for p in Path("/dev/shm").glob(f"ddp-scratch-{job.agent.pid}-*")}
    assert scratch, "the job has a folder in memory"
    ours = set().union(*map(within, scratch)) | within(job.temp) - {job.temp} | within(logs) - {logs}
    assert any(path.is_socket() for path in ours)
    assert any(path.name == "stdout.log" for path in ours)
    assert open_to_others(ours) == {}
    (job.there / "fail").touch()
    job.await_there("trains-2")
    (job.there / "end").touch()
    assert job.wait() == 0, job.stderr()
    assert open_to_others(within(logs) - {logs} | within(job.temp) - {job.temp}) == {}
    assert logs.stat().st_mode & 0o777 == 0o755  # where others may look which runs there are


def test_what_a_service_leaves_is_its_users(tmp_path: Path, open_umask: None) -> None:
    """Its store, lock, keys and the socket that it may be given."""
    made("key", str(tmp_path / "keys"))
    where = ("--listen", f"unix:{tmp_path}/socket", "--store", f"file:{tmp_path}/store")
    service = Service("--listen", "127.0.0.1:0", *where, "--token-keys", str(tmp_path / "keys"))
    try:
        service.await_endpoint()
        found = within(tmp_path) - {tmp_path}
        assert {path.name for path in found} >= {"keys", "socket", "store"}
        assert open_to_others(found) == {}
    finally:
        service.close()


def test_neighbours_are_of_the_same_user() -> None:
    """The kernel says who is at the other end of an abstract socket, and that is asked before anything is sent."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert segment._is_of_this_user(one)
        stranger = struct.pack("3i", os.getpid(), os.getuid() + 1, os.getgid())
        assert not segment._is_of_this_user(_Claims(stranger))  # type: ignore[arg-type]


class _Claims:
    """Another user's end of a connection; to have a real one takes another user."""

    def __init__(self, credentials: bytes) -> None:
        self._credentials = credentials

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        assert (level, name, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return self._credentials


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")
def test_other_users_cannot_open_shared_memory() -> None:
    """Though it has overheard the name and the secret."""
    door = segment.open_listener()
    words = (door.name, segment.hello(door.secret, 1).hex())
    with door.socket, subprocess.Popen([sys.executable, "-c", STRANGER, *words]) as stranger:
        neighbours = segment.LocalMembers(-1, [None, None])
        segment._accept_one(door, neighbours, 0, time.monotonic() + SOON_S, lambda: "")
        assert neighbours.connections == [None, None]
        assert stranger.wait(SOON_S) == 0, "it saw the door closed"
