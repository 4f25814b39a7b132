"""Error files as torch and the ranks write them, and real out-of-memory kills where this machine allows."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.failure.rank_facts import OomWatch, oom_victim, read_error_record, write_outcome
from launcher.failure.verdict import ErrorRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.nightly(instead="::test_reads_torchs_short_form")
def test_reads_what_torch_record_writes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "error.json"
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main(): raise ValueError('bad: batch')\n"
        "main()\n"
    )
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    subprocess.run([sys.executable, "-c", script], env=env, stderr=subprocess.DEVNULL, check=False)
    record = read_error_record(str(file))
    assert record is not None
    assert (record.type, record.message) == ("ValueError", "bad: batch")
    assert "in main" in record.traceback


def test_reads_torchs_short_form(tmp_path: Path) -> None:
    (tmp_path / "short").write_text(json.dumps({"message": "it broke", "timestamp": "12"}))
    assert read_error_record(str(tmp_path / "short")) == ErrorRecord("Error", "it broke")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"message": {"mess',
        b"[1]",
        b"null",
        b"\xff\xfe\x00",
        b'{"message": 3}',
        b'{"type": 3}',
        b"[" * 99999,
    ],
)
def test_garbage_tells_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "error.json").write_bytes(content)
    assert read_error_record(str(tmp_path / "error.json")) is None


def test_wrong_inner_types_are_survived(tmp_path: Path) -> None:
    odd = {"message": {"message": "E: x", "extraInfo": {"py_callstack": []}}}
    (tmp_path / "error.json").write_text(json.dumps(odd))
    assert read_error_record(str(tmp_path / "error.json")) == ErrorRecord("E", "x")


def test_neither_pipes_nor_huge_files_nor_folders_hold_us_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 33)
    for name in ("pipe", "huge", ".", "missing"):
        assert read_error_record(str(tmp_path / name)) is None


@pytest.mark.parametrize(
    ("record", "pid"),
    [
        ("3,1234,98765,-;Killed process 4242 (python) total-vm:1kB, anon-rss:2kB, file-rss:3kB", 4242),
        ("3,1,9,-;Killed process 4242, UID 1000, (python) total-vm:1kB, anon-rss:2kB", 4242),
        ("3,1,9,-;Out of memory: Killed process 4242 (python3) total-vm:1kB, UID:0 oom_score_adj:0", 4242),
        ("3,1,9,-;Memory cgroup out of memory: Killed process 4242 (python3) total-vm:1kB", 4242),
        ("6,1,9,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4242,uid=0", 4242),
        (
            "3,1,9,-;Memory cgroup out of memory: Kill process 4242 (python) score 900 or sacrifice child",
            None,
        ),
        ("6,1,9,-;oom_reaper: reaped process 4242 (python), now anon-rss:0kB", None),
        ("12,1,9,-;Out of memory: Killed process 4242 (forged by a user)", None),
        ("6,1,9,-;usb 1-1: new device", None),
        ("garbage", None),
    ],
)
def test_the_kernels_words_of_several_versions(record: str, pid: int | None) -> None:
    assert oom_victim(record) == pid


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_each_step_of_the_counter_explains_one_death(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("oom 1\noom_kill 5\noom_group_kill 0\n")
    watch = OomWatch(kmsg="/nonexistent", vmstat="/nonexistent")
    watch.add_cgroup(str(tmp_path))
    assert watch.killed(1) is False
    (tmp_path / name).write_text("oom 2\noom_kill 6\n")
    assert [watch.killed(2), watch.killed(3)] == [True, False]
    watch.close()


def test_a_nested_count_of_version_2_is_not_taken_twice(tmp_path: Path) -> None:
    inner = tmp_path / "ranks"
    inner.mkdir()
    for folder in (tmp_path, inner):
        (folder / "memory.events").write_text("oom_kill 0\n")
    watch = OomWatch(kmsg="/nonexistent", vmstat="/nonexistent")
    watch.add_cgroup(str(tmp_path), str(inner))
    for folder in (tmp_path, inner):
        (folder / "memory.events").write_text("oom_kill 1\n")
    assert [watch.killed(1), watch.killed(2)] == [True, False]
    watch.close()


@pytest.fixture
def limited() -> Iterator[Path]:
    folder = MEMORY_V1 / f"ddp-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(32 << 20))
        yield folder
    finally:
        folder.rmdir()


def test_a_real_out_of_memory_kill_is_told_from_another_kill(limited: Path) -> None:
    watch = OomWatch()
    watch.add_cgroup(str(limited))
    join = f"open('{limited}/cgroup.procs', 'w').write('0'); "
    plain = subprocess.Popen([sys.executable, "-c", join + "input()"], stdin=subprocess.PIPE)
    plain.kill()
    assert plain.wait() == -signal.SIGKILL
    assert plain.stdin is not None
    plain.stdin.close()
    assert watch.killed(plain.pid) is False
    greedy = subprocess.Popen(
        [sys.executable, "-c", join + "x = bytearray(1 << 28); x[::4096] = b'1' * 65536"]
    )
    assert greedy.wait() == -signal.SIGKILL
    assert watch.killed(greedy.pid) is True
    watch.close()


def test_the_outcome_is_written_whole_and_private(tmp_path: Path) -> None:
    file = tmp_path / "failure.json"
    file.write_text("old")
    write_outcome(str(file), {"reason": "x\ud800", "n": 1})
    assert json.loads(file.read_text()) == {"reason": "x\ud800", "n": 1}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(TypeError):
        write_outcome(str(file), {"bad": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["failure.json"]
