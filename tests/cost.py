"""Runs a command and prints what it cost: the wall time, and the CPU time of every process that it started.

A process that outlives its parent is handed to this one, which waits for it: the kernel adds up the CPU time of those
that are waited for, and of no others.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
ORPHANS_END_WITHIN_S = 10.0


def main() -> int:
    signal.signal(signal.SIGINT, lambda *_: None)  # the command gets it too, and ends
    began = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = subprocess.Popen(sys.argv[1:])  # kept: a Popen that is discarded may reap its process itself
    status = wait_for(command.pid)
    wait_for_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, wall_s = used.ru_utime + used.ru_stime, time.monotonic() - began
    print(f"took {wall_s / 60:.1f} minutes and {cpu_s / 60:.1f} CPU minutes", flush=True)
    return status if status >= 0 else 128 - status


def wait_for(pid: int) -> int:
    """The exit status of `pid`; orphans that end before it are waited for as well."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def wait_for_orphans() -> None:
    deadline = time.monotonic() + ORPHANS_END_WITHIN_S
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.05)
    print("processes are left over; their CPU time is not counted", flush=True)


if __name__ == "__main__":
    sys.exit(main())
