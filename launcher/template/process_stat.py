"""Reads /proc/PID/stat of a process or a thread.

This module does not use psutil: the zygote loads the standard library only, and the launcher does not depend on psutil.
One line of the file has all fields.
"""

from __future__ import annotations

import os
from typing import NamedTuple

_PF_EXITING = 0x4  # a flag of the kernel
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    state: str  # one letter: R, S, D, T, t, Z, X
    parent: int
    cpu_s: float  # of the process, and of those of its children that have ended
    session: int = 0
    is_exiting: bool = False  # in the kernel's exit, or ended: no signal changes its exit code any more


def process_stat(pid: int | str, task: str = "") -> ProcessStat | None:
    """Return None if the process has ended or is not visible. `task` selects one of its threads."""
    try:
        with open(f"/proc/{pid}/task/{task}/stat" if task else f"/proc/{pid}/stat", "rb") as file:
            fields = (
                file.read().rpartition(b")")[2].split()
            )  # a command's name may contain anything, parentheses included
        cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
        is_exiting = bool(int(fields[6]) & _PF_EXITING)
        return ProcessStat(fields[0].decode(), int(fields[1]), cpu_s, int(fields[3]), is_exiting)
    except (OSError, ValueError, IndexError):
        return None
