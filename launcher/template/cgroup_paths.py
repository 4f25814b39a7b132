"""The cgroups of a process, from /proc/PID/cgroup and the mounts of the hierarchies.

psutil does not report them. The module belongs to the template because both agent and zygote use it.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Membership(NamedTuple):
    controllers: tuple[str, ...]  # of version 1; () for version 2
    path: str  # within the hierarchy, as the process's cgroup namespace shows it


def memberships(process: int | str = "self", root: str = "/") -> list[Membership]:
    """Return [] if the process has ended, or on a system without cgroups. `root` is put before /proc (for tests)."""
    found = []
    for line in _lines(os.path.join(root, f"proc/{process}/cgroup")):
        _number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            found.append(Membership(tuple(controllers.split(",")) if controllers else (), path))
    return found


def folders(process: int | str, controller: str) -> list[str]:
    """Return the cgroup folders of the process in hierarchies that may have this controller."""
    mine = memberships(process)
    found = []
    for mount in _mounts():
        if mount.kind == "cgroup2":
            found += [_seen(mount, each.path) for each in mine if not each.controllers]
        elif controller in mount.options:
            found += [_seen(mount, each.path) for each in mine if controller in each.controllers]
    return found


def unified_folder() -> str:
    """Return the process's own cgroup of version 2; "" without one."""
    return next((folder for folder in folders("self", "") if folder), "")


def upwards(mount: str, path: str) -> list[str]:
    """Return the cgroup and its ancestors.

    In a container `path` may be the path on the host, which does not exist, so the mount itself is always included.
    """
    parts = [part for part in path.split("/") if part]
    return [os.path.join(mount, *parts[:depth]) for depth in range(len(parts) + 1)]


class _Mount(NamedTuple):
    kind: str
    root: str  # of the hierarchy: what the mount shows
    point: str
    options: tuple[str, ...]


def _mounts() -> list[_Mount]:
    found = []
    for line in _lines("/proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        words, (kind, *rest) = mount.split(), source.split() or [""]
        if kind in ("cgroup", "cgroup2") and len(words) > 4:
            found.append(_Mount(kind, words[3], words[4], tuple(rest[-1].split(",")) if rest else ()))
    return found


def _seen(mount: _Mount, path: str) -> str:
    """In a container the mount shows the container's own cgroup as its root."""
    is_below = (path + "/").startswith(mount.root.rstrip("/") + "/")
    return os.path.normpath(os.path.join(mount.point, os.path.relpath(path, mount.root) if is_below else "."))


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []
