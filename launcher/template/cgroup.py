"""A cgroup for this job, if the system permits one: it catches processes that the process tree misses.

Only membership and `cgroup.kill` are used. No limit is set and no controller is enabled, so the accounting of the
parent group's owner (Slurm, Kubernetes, systemd) does not change.

Agent and zygote remove the group. If both are killed at once, it stays, without members: the next zygote removes it.
"""

from __future__ import annotations

import contextlib
import os

from .cgroup_paths import unified_folder

PREFIX = "ddp-launch-"
_ATTEMPTS = 3  # another job may remove the group while it has no member yet


def place(name: str) -> str:
    """Return the folder of a job's cgroup, below the current one; "" without cgroups of version 2."""
    parent = unified_folder()
    return os.path.join(parent, PREFIX + name) if parent else ""


def enter(folder: str) -> bool:
    """Create the cgroup if needed, and become a member. Return False if that is not permitted."""
    for _attempt in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            os.mkdir(folder)
        if os.path.exists(os.path.join(folder, "cgroup.kill")) and _join(folder):
            return True
        if os.path.exists(folder):
            break
    remove(folder)
    return False


def remove_left_behind(beside: str) -> None:
    """Remove the groups of ended jobs next to this one. The kernel refuses to remove a group that has a member."""
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.dirname(beside)):
            if name.startswith(PREFIX):
                remove(os.path.join(os.path.dirname(beside), name))


def leave(folder: str) -> bool:
    """Move to the parent cgroup, so that `kill` does not kill the caller."""
    return _join(os.path.dirname(folder))


def kill(folder: str) -> None:
    """Send SIGKILL to every member at once, even if members fork new processes at that time."""
    _write(os.path.join(folder, "cgroup.kill"), "1")


def remove(folder: str) -> bool:
    """Return False while it still has members."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _join(folder: str) -> bool:
    return _write(os.path.join(folder, "cgroup.procs"), "0")


def _write(path: str, text: str) -> bool:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)
        file.flush()
        return True
    return False
