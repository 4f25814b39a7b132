"""Whether a rank waits for a person to type: such a rank makes no progress, and is not hung.

The kernel shows the system call in which a thread sleeps. `input` and pdb read standard input, or wait for it first: an
editor of lines with `select` on this one descriptor, or with `poll`. The arguments of `poll` do not say for what it
waits, so there the rank must also show a prompt. IPython's debugger waits in a thread of its own, with `epoll` on a set
that contains standard input.
"""

from __future__ import annotations

import os
import platform
import stat

from launcher.output import terminal

# By machine: the numbers of read, of select and pselect6, of poll and ppoll, of wait4 and waitid, of epoll_wait and its
# successors, of futex.
_CALLS = {
    "x86_64": (("0",), ("23", "270"), ("7", "271"), ("61", "247"), ("232", "281", "441"), ("202",)),
    "aarch64": (("63",), ("72",), ("73",), ("260", "95"), ("22", "441"), ("98",)),
}
_IS_KNOWN = platform.machine() in _CALLS
_READ, _SELECT, _POLL, _WAIT, _EPOLL, _FUTEX = _CALLS.get(platform.machine(), ((),) * 6)
_THREADS_LIMIT = 64
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
    return reads or selects or polls or _watches_input(pid, number, arguments)


def _watches_input(pid: int, number: str, arguments: list[str]) -> bool:
    """Whether the main thread, or one that it waits for, sleeps in `epoll` on a set with standard input."""
    if number in _EPOLL:
        return _contains_input(pid, arguments[0])
    if number not in _FUTEX or not terminal.is_raw():  # a look at all threads costs milliseconds
        return False
    try:
        threads = os.listdir(f"/proc/{pid}/task")[:_THREADS_LIMIT]
    except OSError:
        return False
    return any(_watches_in_thread(pid, thread) for thread in threads)


def _watches_in_thread(pid: int, thread: str) -> bool:
    try:
        with open(f"/proc/{pid}/task/{thread}/syscall") as file:
            number, *arguments = file.read().split()
    except (OSError, ValueError):
        return False
    return number in _EPOLL and _contains_input(pid, arguments[0])


def _contains_input(pid: int, epoll: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{int(epoll, 16)}") as file:
            return any(line.split()[:2] == ["tfd:", "0"] for line in file)
    except (OSError, ValueError):
        return False


def times_woken(pid: int) -> int:
    """Return a number that changes when the main thread of this rank stops to wait."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))
    except (OSError, ValueError, StopIteration):
        return 0
