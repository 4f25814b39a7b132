"""A lease on a folder of commits. Two jobs in one folder resume from each other's commits, and remove them.

On one machine the kernel is the evidence: the first rank of a job holds a lock on a file beside the folder, which ends
with its process. Other machines may not see that lock. So the holder also renews the time of the file. Who finds the
file of another machine looks at this time, by the clock of the file system, and if it is recent, watches whether it
changes. After a crash, the lease is free at once on the same machine. Other machines wait for `_WATCH_S` at most.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp.telemetry.coded import WrongUse
from ddp.telemetry.peers import boot_id

_RENEW_S, _WATCH_S, _STALE_S = 5.0, 20.0, 60.0
_LOOK_EVERY_S = 0.2
_HELD = (errno.EACCES, errno.EAGAIN)
_OF_COMMITS = (
    "Two jobs would resume from each other's commits and remove them. Use another folder, or State(start_from=...) to "
    "begin from a commit there. If you mean it: State(shares_folder=True)"
)


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    job: str
    host: str
    boot: str  # of the kernel: what it says about locks counts on this machine only
    pid: int


def this_process() -> LeaseHolder:
    job = os.environ.get("DDP_JOB_ID") or f"of process {os.getpid()} on {socket.gethostname()}"
    boot = ""
    with contextlib.suppress(OSError):
        boot = boot_id()
    return LeaseHolder(job, socket.gethostname(), boot, os.getpid())


class FolderLease:
    """Held until `release`, or the end of the process."""

    def __init__(self, fd: int, holder: LeaseHolder) -> None:
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)
        self._over = threading.Event()
        self.release = weakref.finalize(self, _release, fd, self._over, os.getpid())
        self.release.atexit = False  # the kernel does it
        with contextlib.suppress(RuntimeError):  # without a thread, the lock still counts on this machine
            threading.Thread(target=_renew, args=(fd, self._over), name="ddp-lease", daemon=True).start()


def _renew(fd: int, over: threading.Event) -> None:
    while not over.wait(_RENEW_S):
        with contextlib.suppress(OSError):
            os.utime(fd)


def _release(fd: int, over: threading.Event, pid: int) -> None:
    over.set()
    with contextlib.suppress(OSError):
        if os.getpid() == pid:
            os.ftruncate(fd, 0)
        os.close(fd)


def take(folder: Path, holder: LeaseHolder, advice: str = _OF_COMMITS) -> FolderLease | None:
    """Take the lease. None: another process of this job has it, or the folder cannot be written.

    WrongUse: another job has it.
    """
    if (opened := _opened(folder.resolve())) is None:
        return None
    fd, beside = opened
    has_lock, knows_locks = _locked(fd)
    other = _read(fd)
    is_same_job = other is not None and other.job == holder.job
    has_ended = has_lock and other is not None and other.boot == holder.boot
    if other is not None and not is_same_job and not has_ended:
        if (knows_locks and not has_lock) or _is_renewed(fd, beside):
            os.close(fd)
            raise WrongUse(
                f"the job {other.job} (process {other.pid} on {other.host}) runs and uses the folder {folder}. {advice}"
            )
    if is_same_job and knows_locks and not has_lock:
        os.close(fd)
        return None
    return FolderLease(fd, holder)


def _opened(folder: Path) -> tuple[int, Path] | None:
    """The file, and the folder in which it is: beside the commits, or among them. None: the first commit says why."""
    for place in (path_for(folder), folder / ".lease"):
        with contextlib.suppress(OSError):
            if place.parent != folder:
                place.parent.mkdir(parents=True, exist_ok=True)
            return os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), place.parent
    return None


def path_for(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lease")


def _locked(fd: int) -> tuple[bool, bool]:
    """Whether this process has the lock now, and whether this file system has locks."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False, error.errno in _HELD
    return True, True


def _read(fd: int) -> LeaseHolder | None:
    """None: nobody has taken it, or the last holder has given it back."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        return LeaseHolder(str(found["job"]), str(found["host"]), str(found["boot"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_renewed(fd: int, folder: Path) -> bool:
    """Whether the time of the file changes. The clock is that of the file system: the time of a new file."""
    before = os.fstat(fd).st_mtime_ns
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        if os.fstat(probe.fileno()).st_mtime_ns - before > _STALE_S * 1e9:
            return False
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        if os.fstat(fd).st_mtime_ns != before:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False
