"""Whether a rank waits for a person to type: such a rank makes no progress, and is not hung.

The kernel shows the system call in which a thread sleeps. `input` and pdb read standard input, or wait for it first: an
editor of lines with `select` on this one descriptor, or with `poll`. The arguments of `poll` do not say for what it
waits, so there the rank must also show a prompt.
"""

from __future__ import annotations

import os
import platform
import stat

# By machine: the numbers of read, of select and pselect6, of poll and ppoll, of wait4 and waitid.
_CALLS = {
    "x86_64": (("0",), ("23", "270"), ("7", "271"), ("61", "247")),
    "aarch64": (("63",), ("72",), ("73",), ("260", "95")),
}
_IS_KNOWN = platform.machine() in _CALLS
_READ, _SELECT, _POLL, _WAIT = _CALLS.get(platform.machine(), ((), (), (), ()))
_STDIN, _ONE = "0x0", "0x1"


def someone_may_type() -> bool:
    """Whether the standard input of this command is one that a rank may wait for."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return os.isatty(0) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def waits_for_input(pid: int, shows_prompt: bool) -> bool | None:
    """Whether the main thread of this rank sleeps until something arrives on the standard input of this command.

    None if this is unknown: the kernel does not show it, or the rank waits for a process that it has started.
    """
    try:
        with open(f"/proc/{pid}/syscall") as file:
            number, *arguments = file.read().split()
        ours, theirs = os.fstat(0), os.stat(f"/proc/{pid}/fd/0")
    except (FileNotFoundError, ProcessLookupError, ValueError):  # it has ended
        return False
    except OSError:
        return None
    if not _IS_KNOWN or number in _WAIT:
        return None
    if not arguments or not os.path.samestat(ours, theirs):
        return False
    reads = number in _READ and arguments[0] == _STDIN
    selects = number in _SELECT and arguments[0] == _ONE  # all descriptors below 1
    polls = number in _POLL and arguments[1] == _ONE and shows_prompt
    return reads or selects or polls


def times_woken(pid: int) -> int:
    """Return a number that changes when the main thread of this rank stops to wait."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))
    except (OSError, ValueError, StopIteration):
        return 0
