"""The node's scratch folder: private, in memory where there is room, and gone when the job is.

The zygote makes it and takes it away, because it outlives an agent that is killed. Where both were killed at once the
folder stays; it may hold gigabytes of memory, so the next zygote of the same user on this machine takes it away. That
nobody uses a folder is told by its lock, not by a process number: those mean nothing in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "ddp-scratch-"
_IN_MEMORY = "/dev/shm"
_YOUNG_S = 60.0  # made a moment ago, and perhaps about to be locked


def place(name: str) -> str:
    """A path with that name, and a random part that other users cannot guess. Nothing is created yet."""
    root = _IN_MEMORY if os.path.isdir(_IN_MEMORY) and os.access(_IN_MEMORY, os.W_OK | os.X_OK) else ""
    return os.path.join(root or os.environ.get("TMPDIR") or "/tmp", f"{PREFIX}{name}-{os.urandom(6).hex()}")


def ensure(path: str) -> None:
    """By the agent or by the zygote, whoever comes first; what is in it is kept."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def make(path: str) -> int:
    """The lock, held until it is closed."""
    ensure(path)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def remove_left_behind(beside: str) -> None:
    """Unused folders of this user in memory. Those on disk stay: they take no memory, and /tmp may be slow to list."""
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
    """As far as it goes: what another user has put there stays."""
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            _quietly(os.unlink, os.path.join(folder, name))
        for name in folders:
            inside = os.path.join(folder, name)
            _quietly(os.unlink if os.path.islink(inside) else os.rmdir, inside)
    _quietly(os.rmdir, path)


def _quietly(act: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(OSError):
        act(path)
