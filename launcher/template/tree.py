"""Finds and kills the descendants of a process; also the prctl calls (subreaper, parent-death signal)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Container
from typing import NamedTuple

# --- /proc/PID/stat --------------------------------------------------------------------------------
#
# Reads /proc/PID/stat of a process or a thread.
#
# It does not use psutil: the zygote loads the standard library only, and the launcher does not depend on
# psutil. One line of the file has all fields.

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


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

_LOOK_AGAIN_S = 0.01
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Send this process SIGKILL when its parent ends, or at once if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracing_by_agent(zygote: int) -> None:
    """Let the agent's tools read the stacks of this process, also where only ancestors may trace (Yama)."""
    stat = process_stat(zygote)
    if stat is not None:
        _libc.prctl(_PR_SET_PTRACER, stat.parent, 0, 0, 0)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _none(_pid: int) -> bool:
    return False


def descendants(root: int, left_out: Callable[[int], bool] = _none) -> list[int]:
    """Return every process below `root`, parents before children. Nothing below one that is `left_out` is listed."""
    found: list[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in _children(pid) if not left_out(child)]
        found += level
    return found


def kill_all(root: int, spared: Container[int] = (), left_out: Callable[[int], bool] = _none) -> int:
    """Send SIGKILL to everything below `root`. Return the number of killed processes; the caller reaps and repeats
    until none are left.

    `spared` are counted, but not killed. Processes that are `left_out`, and all below them, are neither.
    """
    killed = 0
    for pid in descendants(root, left_out):
        if pid in spared:
            killed += 1
            continue
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            continue  # it belongs to another user now, as under sudo: do not end it or wait for it
        except ProcessLookupError:
            pass  # ended between the scan and the kill
        killed += 1
    return killed


def in_other_sessions(root: int, sessions: Container[int]) -> frozenset[int]:
    """Return the processes below `root` that are in none of these sessions."""
    found = ((pid, process_stat(pid)) for pid in descendants(root))
    return frozenset(pid for pid, stat in found if stat is not None and stat.session not in sessions)


def is_cleaner(pid: int) -> bool:
    """Whether the process cleans up after others, and ends by itself when these are gone. That of torch waits 2 s.

    It holds the names of semaphores or shared memory: if it is killed, the files in /dev/shm stay.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return any(name in command for name in _CLEANERS)
    return False


def reap_all(root: int, timeout_s: float = 10.0, left_out: Callable[[int], bool] = _none) -> bool:
    """Kill and reap until `root`, which must be the caller, has no descendant. Return False after the timeout.

    Processes that are `left_out`, and all below them, stay, and so does their exit status.
    """
    give_up = time.monotonic() + timeout_s
    while kill_all(root, (), left_out):
        if time.monotonic() > give_up:
            return False
        children = [child for child in _children(root) if not left_out(child)]
        for child in children[:1]:
            # Wait briefly only: the child may have been forked after the scan, and not been killed yet.
            await_child(child, _LOOK_AGAIN_S)
        for child in children[1:]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
    return True


def is_in_session_of(root: int) -> Callable[[int], bool]:
    """Return whether a process is in the session of `root`, as what `root` itself starts is."""
    session = os.getsid(root)

    def belongs(pid: int) -> bool:
        stat = process_stat(pid)
        return stat is not None and stat.session == session

    return belongs


def await_child(child: int, timeout_s: float) -> int | None:
    """Reap this child as soon as it ends. Return its wait status, or None after the timeout."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        ended = os.pidfd_open(child)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(timeout_s * 1000)
            pid, status = os.waitpid(child, os.WNOHANG)
        finally:
            os.close(ended)
        return status if pid else None
    return None


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    found: list[int] = []
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            if not _kernel_lists_children():
                return _children_by_scan(pid)
    return found


def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _children_by_scan(parent: int) -> list[int]:
    """Scan /proc, for kernels built without /proc/PID/task/TID/children."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = process_stat(name)
            if stat is not None and stat.parent == parent:
                found.append(int(name))
    return found
