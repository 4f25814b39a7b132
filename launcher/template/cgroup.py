"""A cgroup of the job's own, where the system lets us make one: the net under the process tree.

Only membership and `cgroup.kill` are used; no limit is set and no controller enabled, so accounting by whoever
owns the parent group (Slurm, Kubernetes, systemd) stays as it is.
"""

from __future__ import annotations

import contextlib
import os

from .cgroup_paths import unified_folder


def place(name: str) -> str:
    """The folder that a cgroup of this name would have, below our own; "" without cgroups of version 2."""
    parent = unified_folder()
    return os.path.join(parent, name) if parent else ""


def enter(folder: str) -> bool:
    """Make it, unless it is there already, and become its member; False where that is not allowed."""
    with contextlib.suppress(OSError):
        os.mkdir(folder)
    if os.path.exists(os.path.join(folder, "cgroup.kill")) and _join(folder):
        return True
    remove(folder)
    return False


def leave(folder: str) -> bool:
    """Back to the group above, so that `kill` spares the caller."""
    return _join(os.path.dirname(folder))


def kill(folder: str) -> None:
    """SIGKILL for every member at once, however fast they fork."""
    _write(os.path.join(folder, "cgroup.kill"), "1")


def remove(folder: str) -> bool:
    """False while it still has members."""
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
