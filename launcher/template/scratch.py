"""The node's scratch folder: private, in memory if possible, and removed at the end of the job.

The zygote creates and removes it, because it outlives an agent that is killed. If both are killed at once, the folder
stays and may hold gigabytes of memory. So the next zygote of the same user on this machine removes it. A lock shows
whether a folder is in use. A process number cannot: it has no meaning in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable

PREFIX = "ddp-scratch-"
_IN_MEMORY = "/dev/shm"
_YOUNG_S = 60.0  # new, and its zygote may not have locked it yet


def place(name: str) -> str:
    """Return a path with that name and a random part that other users cannot guess. Create nothing yet."""
    root = _IN_MEMORY if os.path.isdir(_IN_MEMORY) and os.access(_IN_MEMORY, os.W_OK | os.X_OK) else ""
    return os.path.join(root or os.environ.get("TMPDIR") or "/tmp", f"{PREFIX}{name}-{os.urandom(6).hex()}")


def ensure(path: str) -> None:
    """Create the folder if needed, in the agent or the zygote. Keep what is in it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def make(path: str) -> int:
    """Create the folder and return its lock, held until it is closed."""
    ensure(path)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def remove_left_behind(beside: str) -> None:
    """Remove unused folders of this user in /dev/shm (tmpfs).

    Those on disk use no memory, and listing /tmp can be slow.
    """
    if os.path.dirname(beside) != _IN_MEMORY:
        return
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(beside)) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.path != beside:
                with contextlib.suppress(OSError):
                    _remove_if_unused(entry.path)


def _remove_if_unused(path: str) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    if time.time() - found.st_ctime < _YOUNG_S:
        return
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(path)
    finally:
        os.close(lock)


def remove(path: str) -> None:
    """Remove what can be removed: files that belong to another user may stay."""
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            _without_gc(os.unlink, os.path.join(folder, name))
        for name in folders:
            inside = os.path.join(folder, name)
            _without_gc(os.unlink if os.path.islink(inside) else os.rmdir, inside)
    _without_gc(os.rmdir, path)


def _without_gc(act: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(OSError):
        act(path)
