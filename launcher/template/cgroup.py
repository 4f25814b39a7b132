"""A cgroup for this job, if the system permits one: it catches processes that the process tree misses.

Only membership and `cgroup.kill` are used. No limit is set and no controller is enabled, so the accounting of the
parent group's owner (Slurm, Kubernetes, systemd) does not change.

Agent and zygote remove the group. If both are killed at once, it stays, without members: the next zygote removes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import NamedTuple

# --- control groups --------------------------------------------------------------------------------

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


def leave(folder: str, others: Iterable[int] = ()) -> bool:
    """Move to the parent cgroup, so that `kill` does not kill the caller and these others."""
    return all([_join(os.path.dirname(folder), pid) for pid in (0, *others)])


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


def _join(folder: str, pid: int = 0) -> bool:
    return _write(os.path.join(folder, "cgroup.procs"), str(pid))


def _write(path: str, text: str) -> bool:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)
        file.flush()
        return True
    return False


# --- the cgroups of a process ----------------------------------------------------------------------
#
# From /proc/PID/cgroup and the mounts of the hierarchies.
#
# psutil does not report them. They are in this room because both agent and zygote use them.


class CgroupMembership(NamedTuple):
    controllers: tuple[str, ...]  # of version 1; () for version 2
    path: str  # within the hierarchy, as the process's cgroup namespace shows it


def memberships(process: int | str = "self", root: str = "") -> list[CgroupMembership]:
    """Return [] if the process has ended, or on a system without cgroups. `root` is put before /proc (for tests)."""
    found = []
    for line in _lines(f"{root}/proc/{process}/cgroup"):
        _number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            found.append(CgroupMembership(tuple(controllers.split(",")) if controllers else (), path))
    return found


def folders(process: int | str, controller: str, root: str = "") -> list[str]:
    """Return the cgroup folders of the process in hierarchies that may have this controller."""
    mine = memberships(process, root)
    found = []
    for mount in _mounts(root):
        if mount.kind == "cgroup2":
            found += [_path_inside(mount, each.path) for each in mine if not each.controllers]
        elif controller in mount.options:
            found += [_path_inside(mount, each.path) for each in mine if controller in each.controllers]
    return found


def unified_folder() -> str:
    """Return the process's own cgroup of version 2; "" without one."""
    return next((folder for folder in folders("self", "") if folder), "")


def upwards(controller: str, root: str = "") -> list[str]:
    """Return the folders of our own cgroups and their ancestors, up to the outermost visible ones.

    In a container the own one may have its path on the host, which does not exist.
    """
    found = []
    for folder in folders("self", controller, root):
        while len(folder) > 1:
            if os.path.exists(f"{root}{folder}/cgroup.procs"):
                found.append(root + folder)
            folder = os.path.dirname(folder)
    return found


class _Mount(NamedTuple):
    kind: str
    root: str  # of the hierarchy: what the mount shows
    point: str
    options: tuple[str, ...]


def _mounts(root: str) -> list[_Mount]:
    found = []
    for line in _lines(f"{root}/proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        words, (kind, *rest) = mount.split(), source.split() or [""]
        if kind in ("cgroup", "cgroup2") and len(words) > 4:
            found.append(_Mount(kind, words[3], words[4], tuple(rest[-1].split(",")) if rest else ()))
    return found


def _path_inside(mount: _Mount, path: str) -> str:
    """In a container the mount shows the container's own cgroup as its root."""
    is_below = (path + "/").startswith(mount.root.rstrip("/") + "/")
    return os.path.normpath(os.path.join(mount.point, os.path.relpath(path, mount.root) if is_below else "."))


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


# --- limits ----------------------------------------------------------------------------------------
#
# How much memory and CPU time this process may use: of the machine, and of its cgroups (either version).

_NO_LIMIT = 1 << 60  # cgroups of version 1 report such a number if there is no limit
_MEMORY = (
    ("memory.max", "memory.current", ("inactive_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",)),
)


def memory_limit(folder: str) -> tuple[int, int] | None:
    """Return the limit of a cgroup, and the used memory that the kernel cannot reclaim; None without a limit."""
    for limit, used, droppable in _MEMORY:
        most, now = (_number(f"{folder}/{name}") for name in (limit, used))
        if 0 < most < _NO_LIMIT:
            counts = counts_in(f"{folder}/memory.stat")
            return most, max(0, now - sum(counts.get(name, 0) for name in droppable))
    return None


def cpu_limit(folder: str) -> float | None:
    """Return the quota of a cgroup in CPUs."""
    quota, _, period = "".join(_lines(f"{folder}/cpu.max")).partition(" ")
    numbers = (
        [int(each) for each in (quota, period)]
        if quota.isdecimal() and period.isdecimal()
        else [_number(f"{folder}/cpu.cfs_{each}_us") for each in ("quota", "period")]
    )
    return numbers[0] / numbers[1] if min(numbers) > 0 else None


def free_bytes() -> int:
    """Return 0 if nothing can be read."""
    limits = filter(None, map(memory_limit, upwards("memory")))
    available = counts_in("/proc/meminfo").get("MemAvailable:", 0) << 10
    return min([available, *(limit - used for limit, used in limits)])


def own_bytes() -> int:
    """Return the memory of this process; of pages that it shares with others, its part."""
    return counts_in("/proc/self/smaps_rollup").get("Pss:", 0) << 10


def _number(path: str) -> int:
    """Return 0 if there is no such number: no file, "max" or -1."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else 0


def counts_in(path: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    words = (line.split() for line in _lines(path))
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}
