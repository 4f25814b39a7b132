"""Reads Xid errors from the kernel log: /dev/kmsg, which is often readable only by root, else the journal.

Members of the groups systemd-journal and adm can also read the journal. It is asked only once, before the start:
following it would need a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess

from launcher.machine.xids import Xid, read_kmsg, read_lines

PATH = "/dev/kmsg"
_RECORDS = 20_000  # at most, in one reading
_RECORD_BYTES = 8192  # the kernel's limit
_OF_DRIVER = b"NVRM"


class KernelLog:
    """Raise OSError if the log is not readable. `from_end`: leave out what was written before."""

    def __init__(self, path: str = PATH, *, from_end: bool = False) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if from_end:
            os.lseek(self._fd, 0, os.SEEK_END)

    def close(self) -> None:
        os.close(self._fd)

    def xids(self) -> tuple[Xid, ...]:
        """The errors since the last call."""
        records = []
        for _ in range(_RECORDS):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BrokenPipeError:  # overwritten while we read: the next one is there
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            if _OF_DRIVER in record or b"fallen off the bus" in record:
                records += record.decode(errors="replace").splitlines()
        return read_kmsg(records)


def logged_xids(path: str = PATH) -> tuple[tuple[Xid, ...], bool]:
    """All errors that are still in the log, and whether it is readable."""
    try:
        log = KernelLog(path)
    except OSError:
        return _journal()
    try:
        return log.xids(), True
    finally:
        log.close()


_JOURNAL = (
    "journalctl",
    "--dmesg",
    "--output=short-monotonic",
    "--no-pager",
    "--quiet",
    f"--lines={_RECORDS}",
)
_JOURNAL_S = 3.0
_STAMPED = re.compile(r"^\[\s*(\d+\.\d+)\] \S+ kernel: (.*)")


def _journal() -> tuple[tuple[Xid, ...], bool]:
    try:
        done = subprocess.run(
            _JOURNAL, stdin=subprocess.DEVNULL, capture_output=True, timeout=_JOURNAL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return (), False
    found = [_STAMPED.match(line) for line in done.stdout.decode(errors="replace").splitlines()]
    lines = [(float(each[1]), each[2]) for each in found if each is not None]
    return read_lines(lines), done.returncode == 0 and bool(lines)
