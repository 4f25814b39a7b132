"""A cgroup for this job, if the system permits one: it catches processes that the process tree misses.

Only membership and `cgroup.kill` are used. No limit is set and no controller is enabled, so the accounting of the
parent group's owner (Slurm, Kubernetes, systemd) does not change.
"""

from __future__ import annotations

import contextlib
import os

from .cgroup_paths import unified_folder


def place(name: str) -> str:
    """Return the folder of a cgroup with this name, below the current one; "" without cgroups of version 2."""
    parent = unified_folder()
    return os.path.join(parent, name) if parent else ""


def enter(folder: str) -> bool:
    """Create the cgroup if needed, and become a member. Return False if that is not permitted."""
    with contextlib.suppress(OSError):
        os.mkdir(folder)
    if os.path.exists(os.path.join(folder, "cgroup.kill")) and _join(folder):
        return True
    remove(folder)
    return False


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
