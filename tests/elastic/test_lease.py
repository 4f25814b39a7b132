"""Two jobs with the same folder: the second is told of the first, and nobody is locked out by one that has crashed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ddp.elastic.files import lease
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ME = lease.LeaseHolder("job-b", "here", lease.this_process().boot, os.getpid())
HOLDER = """
import sys
from dataclasses import replace
from pathlib import Path
from ddp.elastic.files import lease
lease._RENEW_S = 0.05
holder = replace(lease.this_process(), job="job-a", boot=sys.argv[2] or lease.this_process().boot)
held = lease.take(Path(sys.argv[1]), holder)
print("held" if held else "not held", flush=True)
sys.stdin.read()
held.release()
"""


@contextmanager
def held(folder: Path, boot: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder), boot]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_other_job_is_named_while_it_runs(tmp_path: Path) -> None:
    with held(tmp_path) as other:
        with pytest.raises(WrongUse, match=rf"job-a \(process {other.pid} on .*shares_folder"):
            lease.take(tmp_path, ME)
        assert lease.take(tmp_path, replace(ME, job="job-a")) is None  # another rank of the same job
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert lease.take(tmp_path, ME) is not None


def test_a_job_that_has_ended_leaves_no_lease(tmp_path: Path) -> None:
    with held(tmp_path) as other:
        other.communicate()
    taken = lease.take(tmp_path, ME)
    assert taken is not None
    taken.release()


def test_on_another_machine_renewal_is_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is not seen here. The time of its file is."""
    monkeypatch.setattr(lease, "_locked", lambda _fd: (True, True))
    monkeypatch.setattr(lease, "_WATCH_S", 60.0)  # it ends with the first renewal
    with held(tmp_path, "another kernel") as other:
        with pytest.raises(WrongUse, match="job-a"):
            lease.take(tmp_path, ME)
        other.send_signal(signal.SIGKILL)
        other.wait()
        monkeypatch.setattr(lease, "_WATCH_S", 0.3)
        assert lease.take(tmp_path, ME) is not None


def test_an_old_lease_of_another_machine_costs_no_time(tmp_path: Path) -> None:
    lock = lease.path_for(tmp_path)
    lock.write_text('{"job": "job-a", "host": "gone", "boot": "another kernel", "pid": 1}')
    os.utime(lock, (1e9, 1e9))
    taken = lease.take(tmp_path, ME)  # without the watch of 20 s
    assert taken is not None
    taken.release()
