"""What a case needs that not every machine has; each function says why it cannot be played, or "" where it can."""

from __future__ import annotations

import os
from pathlib import Path

import lab_host


def missing(what: str) -> str:
    return str(globals()[what]()) if what else ""


def lab() -> str:
    return lab_host.what_is_missing()


def memory_cgroup() -> str:
    folder = "/sys/fs/cgroup/memory"
    usable = os.path.exists(f"{folder}/memory.limit_in_bytes") and os.access(folder, os.W_OK)
    return "" if usable else "no memory cgroup (version 1) that could be given a limit"


def cgroup_2() -> Path:
    unified = Path("/sys/fs/cgroup/unified")
    return unified if unified.is_dir() else Path("/sys/fs/cgroup")


def freezer() -> str:
    usable = (cgroup_2() / "cgroup.procs").exists() and os.access(cgroup_2(), os.W_OK)
    return "" if usable else "no cgroups of version 2 in which a rank could be frozen"
