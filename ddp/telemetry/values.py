"""`ddp.log`: numbers that the script measures, for people who watch the job. Nothing is sent anywhere.

They go into a ring of bytes behind the status page of this rank, which the launcher reads once a second. Only the
process that writes the page writes it: elsewhere, and without the launcher, a call does nothing. A call takes ten
microseconds, makes no system call, and never raises. If a script logs faster than the ring can hold for a second, the
oldest numbers of that second are lost.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddp.telemetry.contracts import (
    HEADER_BLOCK,
    RING_AT,
    STATUS_PAGE,
    VALUES_AT,
    VALUES_COUNTER,
    VALUES_END,
    VALUES_ROOM,
)
from ddp.telemetry.status_page import is_read, keep, kept

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_NAMES, _MOST_CHARS = 32, 64
_LONGEST = VALUES_ROOM // 4


class _Ring:
    def __init__(self, memory: mmap.mmap | None) -> None:
        self._memory, self._pid, self._calls = memory, os.getpid(), 0
        self._written = 0 if memory is None else int.from_bytes(memory[VALUES_AT:RING_AT], "little")
        self._lock = threading.Lock()

    def put(self, values: Mapping[str, Any], step: int | None) -> None:
        """A call that interrupts another one, as a signal does, is left out."""
        if self._memory is None or os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        try:
            self._calls += 1
            found = {
                str(name)[:_MOST_CHARS]: each
                for name, value in list(values.items())[:_MOST_NAMES]
                if (each := _number(value)) is not None
            }
            record = json.dumps([self._calls if step is None else int(step), found], separators=(",", ":"))
            self._write(record.encode("ascii", "replace") + b"\n")
        finally:
            self._lock.release()

    def _write(self, record: bytes) -> None:
        assert self._memory is not None
        if len(record) > _LONGEST:
            return
        at = self._written % VALUES_ROOM
        head = record[: VALUES_ROOM - at]
        self._memory[RING_AT + at : RING_AT + at + len(head)] = head
        self._memory[RING_AT : RING_AT + len(record) - len(head)] = record[len(head) :]
        self._written += len(record)
        self._memory[VALUES_AT:RING_AT] = self._written.to_bytes(VALUES_COUNTER, "little")


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except Exception:  # of any class: a tensor with several numbers, a text
        return None


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Show numbers on the page, in `ddpctl top` and in the metrics: `ddp.log({"loss": loss.item()}, step=step)`.

    `step`: what the chart is drawn over; without it, the number of the call. Any rank may call it, at any time, also
    without the launcher. A tensor on an accelerator is waited for, as by `.item()`. Values that are not numbers
    are left out.
    """
    with suppress(Exception):
        ring: _Ring = kept("values") or keep("values", _Ring(_memory()))
        ring.put(values, step)


def _memory() -> mmap.mmap | None:
    if not is_read():
        return None
    file = os.open(os.environ[STATUS_PAGE], os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = HEADER_BLOCK.packing.unpack(os.pread(file, HEADER_BLOCK.end, 0))[4]
        if pid != os.getpid() or os.fstat(file).st_size < VALUES_END:
            return None
        return mmap.mmap(file, VALUES_END)
    finally:
        os.close(file)
