"""Which open files a rank starts with: standard input, output and error, and nothing else."""

from __future__ import annotations

import os


def close_inherited(spared: int) -> None:
    """Close what the shell above us left open across its exec, all but `spared`; what Python opened itself stays."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != spared and _crosses_exec(fd):
            os.close(fd)


def _crosses_exec(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the one that listed the folder
        return False
