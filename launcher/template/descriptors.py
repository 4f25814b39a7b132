"""Limits the open files of a new rank to standard input, output and error."""

from __future__ import annotations

import os


def close_inherited(*spared: int) -> None:
    """Close what the parent shell left open across its exec, except `spared`. What Python opened itself stays open."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in spared and _crosses_exec(fd):
            os.close(fd)


def _crosses_exec(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor that listed the folder
        return False
