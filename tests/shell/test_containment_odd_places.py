"""Starts and runs in surroundings that are short of something: streams, folders, files, ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from launched import Launch

PLAIN = ("--no-warm-start", "--nproc-per-node", "2")


# --- standard streams --------------------------------------------------------------------------------


CLOSED = [((1,), True), ((2,), False), ((0, 1, 2), True)]
MORE_CLOSED = [((0,), True), ((0,), False), ((1,), False), ((2,), True), ((1, 2), False), ((0, 1, 2), False)]


@pytest.mark.parametrize(
    ("closed", "warm"), [*CLOSED, *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE_CLOSED)]
)
def test_closed_streams(launch: Launch, closed: tuple[int, ...], warm: bool) -> None:
    """What is closed reads and writes like /dev/null; it is not taken by a pipe or socket of the launcher's."""
    source = FAMILY + "print('out'); print('err', file=sys.stderr); sys.stdin.read(); there('ran')\n"

    def close() -> None:
        for fd in closed:
            os.close(fd)

    how = () if warm else ("--no-warm-start",)
    job = launch("--nproc-per-node", "2", *how, source=source, fake_torch="", preexec_fn=close)
    assert job.wait() == 0, job.stderr()
    assert job.is_there("ran-0", "ran-1")()
    assert job.stdout().count("out") == (0 if 1 in closed else 2)
    assert job.stderr().count("err") == (0 if 2 in closed else 2)
    job.assert_nothing_left(0.0)


def test_reader_of_stdout_that_leaves_does_not_stop_the_job(launch: Launch) -> None:
    source = FAMILY + (
        "print('first')\n"
        "while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
        "for i in range(20000): print('x' * 80)\n"
        "there('ran')\n"
    )
    reader, writer = os.pipe()
    job = launch(*PLAIN, source=source, stdout=writer)
    os.close(writer)
    assert b"first" in os.read(reader, 100)
    os.close(reader)
    (job.there / "go").touch()
    assert job.wait() == 0, job.stderr()
    assert job.is_there("ran-0", "ran-1")()


def test_last_output_reaches_a_slow_reader_before_the_box(launch: Launch) -> None:
    """All of it: more than a megabyte, read in small bites, and the box after the last line."""
    source = "import sys\nfor i in range(12000): print(i, 'x' * 90)\nprint('the end')\nsys.exit(3)\n"
    reader, writer = os.pipe()
    job = launch("--no-warm-start", "--nproc-per-node", "1", source=source, stdout=writer, stderr=writer)
    os.close(writer)
    got = bytearray()
    while bite := os.read(reader, 4096):
        got += bite
    os.close(reader)
    assert job.wait() == 3
    text = got.decode()
    assert text.count("x" * 90) == 12000  # no more than is queued for a reader that does not read at all
    assert text.index("the end") < text.index("job failed")


# --- folders -----------------------------------------------------------------------------------------


def test_deleted_folder(launch: Launch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def lose_it() -> None:
        os.chdir(gone)
        gone.rmdir()

    job = launch(*PLAIN, source="", preexec_fn=lose_it)
    assert job.wait() == 2
    assert "directory no longer exists" in job.stderr()
    assert "Traceback" not in job.stderr()


@pytest.mark.parametrize(("code", "kept"), [(3, True), (0, False)])
def test_log_folder_that_disappears(launch: Launch, tmp_path: Path, code: int, kept: bool) -> None:
    source = FAMILY + (
        "print('before'); there('rank')\n"
        "while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
        f"print('after'); sys.exit({code})\n"
    )
    logs = tmp_path / "logs"
    job = launch(*PLAIN, *(("--log-dir", str(logs)) if kept else ()), source=source)
    job.await_there("rank-0", "rank-1")
    shutil.rmtree(logs if kept else job.logs()[0])
    (job.there / "go").touch()
    assert job.wait() == code, job.stderr()
    assert "Traceback" not in job.stderr()
    if code:
        assert "job failed" in job.stderr()
        assert "cannot write" in job.stderr()
    assert job.stdout().count("after") >= 1


# --- limits ------------------------------------------------------------------------------------------


def limited(name: int, soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(name, (soft, hard))


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_many_ranks_with_a_low_limit_on_open_files(launch: Launch, warm: bool) -> None:
    """The agent raises its own; ranks are left with what there was."""
    source = FAMILY + "import resource; print('limit', *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    how = () if warm else ("--no-python", sys.executable, "SCRIPT")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limited(resource.RLIMIT_NOFILE, 64, hard)
    job = launch("--nproc-per-node", "64", *how, source=source, fake_torch="", preexec_fn=limit)
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count(f"limit 64 {hard}") == 64
    job.assert_nothing_left(0.0)


def test_hard_limit_on_open_files_is_told(launch: Launch) -> None:
    limit = limited(resource.RLIMIT_NOFILE, 64, 64)
    words = ("--preflight", "off", "--nproc-per-node", "64", "--no-python", "sleep", "60")
    job = launch(*words, preexec_fn=limit)
    assert job.wait() == 71, job.stderr()
    told = job.said()
    assert "--nproc-per-node" in told
    assert "676" in told
    assert "Traceback" not in job.stderr()
    job.assert_nothing_left(0.0)


@pytest.mark.nightly(instead="::test_deleted_folder")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace")
def test_without_shared_memory(launch: Launch, tmp_path: Path) -> None:
    source = tmp_path / "without.py"
    source.write_text(
        "import os, torch.distributed as dist\nassert not os.access('/dev/shm', os.W_OK | os.F_OK)\n"
        "dist.init_process_group('gloo'); dist.barrier(); print('met')\n"
    )
    unshare = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=0,ro none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "launcher", "--nproc-per-node", "2", str(source)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("met")) == (0, 2), done.stderr


# --- ports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_given_port_is_used_in_every_generation(launch: Launch, warm: bool) -> None:
    port = free_port()
    source = FAMILY + (
        "there(os.environ['DDP_GENERATION'] + '-' + os.environ['MASTER_PORT'])\n"
        "sys.exit(os.environ['DDP_GENERATION'] == '1')\n"
    )
    how = () if warm else ("--no-warm-start",)
    job = launch(
        "--nproc-per-node",
        "1",
        *how,
        "--master-port",
        str(port),
        "--max-restarts",
        "1",
        source=source,
        fake_torch="",
    )
    assert job.wait() == 0, job.stderr()
    assert job.is_there(f"1-{port}-0", f"2-{port}-0")()


def test_port_in_use_from_the_start(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = launch("--master-port", str(port), source="", fake_torch="")
        assert job.wait() == 2
    assert str(port) in job.stderr()
    assert "Traceback" not in job.stderr()
    job.assert_nothing_left(0.0)


def test_port_taken_while_the_job_runs(launch: Launch) -> None:
    """The first generation's store gave it back; somebody else is quicker than the second's."""
    port = free_port()
    slow = (
        "import os, time\n"
        "open(os.environ['THERE'] + '/import', 'w').close()\n"
        "while not os.path.exists(os.environ['THERE'] + '/go'): time.sleep(0.001)\n"
    )
    job = launch("--master-port", str(port), source="", fake_torch=slow)
    job.await_there("import")
    with socket.create_server(("127.0.0.1", port)):
        (job.there / "go").touch()
        assert job.wait() == 75
    assert f"the store cannot listen on 127.0.0.1:{port}: Address already in use" in job.stderr()
    job.assert_nothing_left(0.0)
