"""Reads Xid errors from the kernel log, /dev/kmsg. It is often readable only by root."""

from __future__ import annotations

import os

from launcher.machine.xids import Xid, read_kmsg

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
        return (), False
    try:
        return log.xids(), True
    finally:
        log.close()
