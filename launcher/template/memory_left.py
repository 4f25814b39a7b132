"""How much memory this process may still use: of the machine, and of its cgroups (either version)."""

from __future__ import annotations

import contextlib
import os

from .cgroup import folders

_LIMIT_AND_USED = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int:
    """Return 0 if nothing can be read."""
    found = [_counts("/proc/meminfo").get("MemAvailable:", 0) << 10]
    for folder in folders("self", "memory"):
        while os.path.exists(os.path.join(folder, "cgroup.procs")):
            found.extend(_free_in(folder))
            folder = os.path.dirname(folder)
    return min(found)


def own_bytes() -> int:
    """Return the memory of this process; of pages that it shares with others, its part."""
    return _counts("/proc/self/smaps_rollup").get("Pss:", 0) << 10


def _free_in(folder: str) -> list[int]:
    for limit, used, droppable in _LIMIT_AND_USED:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            most, now = (_number(os.path.join(folder, name)) for name in (limit, used))
            return [most - now + _counts(os.path.join(folder, "memory.stat")).get(droppable, 0)]
    return []


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def _counts(path: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    with contextlib.suppress(OSError), open(path) as file:
        words = [line.split() for line in file]
        return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}
    return {}
