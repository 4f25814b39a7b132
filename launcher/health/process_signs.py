"""Reads from /proc what a rank and the processes that it has started have done so far."""

from __future__ import annotations

from contextlib import suppress

from launcher.health.signs import Signs
from launcher.template import tree
from launcher.template.process_stat import process_stat

_COUNTED = (b"rchar:", b"wchar:")


def signs_of(pid: int, writer: int, output: int) -> Signs:
    """`writer`: the one of these processes that writes the status page; 0 if none does."""
    processes = (pid, *tree.descendants(pid))
    own = writer if writer in processes else pid
    main_cpu_s = _cpu_s(own, task=str(own))
    return Signs(
        main_cpu_s=main_cpu_s,
        other_cpu_s=sum(map(_cpu_s, processes)) - main_cpu_s,
        io_bytes=sum(map(_io_bytes, processes)),
        output=output,
        processes=frozenset(processes),
    )


def _cpu_s(pid: int, task: str = "") -> float:
    stat = process_stat(pid, task)
    return 0.0 if stat is None else stat.cpu_s


def _io_bytes(pid: int) -> int:
    """Return 0 if the process has ended, or belongs to another user."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/io", "rb") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(_COUNTED))
    return 0
