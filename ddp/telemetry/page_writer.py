"""The writer of the status page in Python, used if the compiled writer (`_core/page.c`) is missing.

Both write the same bytes. Each block has a counter that is odd while the block changes; docs/status-page.md describes
the layout. A CPU may reorder stores, so a memory barrier must separate the stores to the counter from those to the
block. Python does not offer barriers, but releasing a lock and taking it again acts as one on every machine. So each
store happens under a lock that no other thread takes.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import dataclass
from time import monotonic_ns

STARTING, DATA, FORWARD, BACKWARD, COMMUNICATE, OPTIMIZER, CHECKPOINT = range(7)
EVALUATION, SECTION, IDLE, EXITING = range(7, 11)
_PART_OF_A_STEP = range(DATA, COMMUNICATE + 1)
_NAMED = (CHECKPOINT, EVALUATION, SECTION)

_SIZE = 4096
_COUNTER = struct.Struct("=Q")
_PID = struct.Struct("=I")
PID_AT, OPENED_AT = 20, 24
PROGRESS_AT, PROGRESS = 64, struct.Struct("=II5Q12Q4I3Q")
SECTION_AT, NAMED = 256, struct.Struct("=QQ104s")
MESSAGE_AT, MESSAGE = 384, struct.Struct("=Q240s")
ERROR_AT, ERROR = 640, struct.Struct("=Q368s")
RING_AT, RING_SLOTS, COLLECTIVE = 1024, 16, struct.Struct("=5QIIiI20s12s")
GROUPS_AT, GROUP_SLOTS, GROUP = 2560, 12, struct.Struct("=II2Q40s24s")
_SLOT = 96
_ASYNC, _PAIR = 1, 2  # a PAIR is a send or a receive, and is counted separately
LONGEST_NAME, _MEMBERS = 40, 24


@dataclass(slots=True)
class _Group:
    size: int
    name: bytes
    members: bytes
    entered: int = 0
    finished: int = 0


class Page:
    """Same interface as `ddp.telemetry._page.Page`."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _SIZE)
        self._lock = threading.Lock()
        self._forked = False
        os.register_at_fork(after_in_child=self._in_forked_child)
        self._entered = 0
        self._moved = self._ever_moved = False
        self._steps_offset = 0
        self._groups: list[_Group] = []
        self._collectives: dict[int, list[object]] = {}
        self._claim()

    def _in_forked_child(self) -> None:
        self._forked = True

    def _claim(self) -> None:
        """Reset the page: another process may have written it, for example if the script runs programs in turn."""
        _PID.pack_into(self._memory, PID_AT, 0)
        self._since = self._step_since = now = monotonic_ns()
        self._phase, self._phase_ns = STARTING, [0] * 12
        self._step = self._last_ns = self._mean_ns = 0
        self._group_timeout_ns = 0
        self._buckets = [
            0
        ] * 6  # count, launched, finished, unused; time of the last launch, of the last finish
        for at, block in ((SECTION_AT, NAMED), (MESSAGE_AT, MESSAGE), (ERROR_AT, ERROR)):
            self._write(at, bytes(block.size))
        for at in range(RING_AT, GROUPS_AT + GROUP_SLOTS * _SLOT, _SLOT):
            self._write(at, bytes(_SLOT - 8))
        self._show_progress()
        _COUNTER.pack_into(self._memory, OPENED_AT, now)
        _PID.pack_into(self._memory, PID_AT, os.getpid())

    def _write(self, at: int, block: bytes) -> None:
        if self._forked:
            return
        memory = self._memory
        odd = _COUNTER.unpack_from(memory, at)[0] | 1  # an earlier writer may have died here
        with self._lock:
            _COUNTER.pack_into(memory, at, odd)
        with self._lock:
            memory[at + 8 : at + 8 + len(block)] = block
        with self._lock:
            _COUNTER.pack_into(memory, at, odd + 1)

    # --- phases, steps, buckets ----------------------------------------------------------------------

    def _show_progress(self) -> None:
        times = (self._since, self._step, self._step_since, self._last_ns, self._mean_ns)
        block = PROGRESS.pack(self._phase, 0, *times, *self._phase_ns, *self._buckets, self._group_timeout_ns)
        self._write(PROGRESS_AT, block)

    def phase(self, number: int) -> int:
        if not STARTING <= number <= EXITING:
            raise ValueError(f"invalid phase {number}: not a number from {STARTING} to {EXITING}")
        before, now = self._phase, monotonic_ns()
        self._phase_ns[before] += now - self._since
        self._phase, self._since = number, now
        self._show_progress()
        if number in _PART_OF_A_STEP:
            self._moved = self._ever_moved = True
        return before

    def mark(self, number: int) -> int:
        """Enter a phase, but do not replace a phase that the script has named.

        Before the first step, communication is part of the phase STARTING.
        """
        now = self._phase
        starting = now == STARTING and number == COMMUNICATE
        return now if now in _NAMED or now == number or starting else self.phase(number)

    def back(self, before: int) -> None:
        now = self._phase
        number = IDLE if before == STARTING != now else before
        if now not in _NAMED and now != number:
            self.phase(number)

    def step(self) -> None:
        if self._ever_moved and not self._moved:
            return  # a second optimizer in the same step
        now = monotonic_ns()
        took, self._step_since, self._moved = now - self._step_since, now, False
        self._step += 1
        self._last_ns = took
        if self._step - self._steps_offset > 1:
            mean = self._mean_ns
            self._mean_ns = mean + (took >> 3) - (mean >> 3) if mean else took
        self._show_progress()

    def number(self, number: int) -> None:
        self._steps_offset += number - self._step
        self._step = number
        self._show_progress()

    def buckets(self, of: int, launched: int, finished: int) -> None:
        before, now = self._buckets, monotonic_ns()
        launched_at = now if launched != before[1] else before[4]
        finished_at = now if finished != before[2] else before[5]
        self._buckets = [of, launched, finished, 0, launched_at, finished_at]
        self._show_progress()

    def group_timeout(self, timeout_s: float) -> None:
        longest = int(min(max(timeout_s, 0.0), 1e9) * 1e9)
        if longest > self._group_timeout_ns:
            self._group_timeout_ns = longest
            self._show_progress()

    # --- groups and collectives ----------------------------------------------------------------------

    def group(self, name: str, size: int, members: str) -> int:
        ranks = members.encode()
        self._groups.append(_Group(size, _cut(name, LONGEST_NAME), ranks if len(ranks) <= _MEMBERS else b""))
        return len(self._groups) - 1

    def _show_group(self, number: int) -> None:
        it = self._groups[number]
        block = GROUP.pack(number + 1, it.size, it.entered, it.finished, it.name, it.members)
        self._write(GROUPS_AT + number % GROUP_SLOTS * _SLOT, block)

    def enter(
        self, group: int, op: str, dtype: str, numel: int, shape: int, peer: int, is_async: int, sequence: int
    ) -> int:
        """`sequence` 0: take the group's next number."""
        known = self._groups[group]
        self._entered += 1
        self._moved = self._ever_moved = True
        flags = (_ASYNC if is_async else 0) | (_PAIR if sequence else 0)
        if not sequence:
            known.entered += 1
            sequence = known.entered
        self._show_group(group)
        facts = [numel, shape, group + 1, peer, flags, _cut(op, 20), _cut(dtype, 12)]
        shown: list[object] = [self._entered, sequence, monotonic_ns(), 0, *facts]
        self._collectives[self._entered % RING_SLOTS] = shown
        self._show_collective(self._entered)
        return self._entered

    def _show_collective(self, number: int) -> None:
        at = RING_AT + number % RING_SLOTS * _SLOT
        self._write(at, COLLECTIVE.pack(*self._collectives[number % RING_SLOTS]))

    def leave(self, ticket: int) -> None:
        shown = self._collectives.get(ticket % RING_SLOTS)
        if shown is not None and shown[0] == ticket and not shown[3]:
            shown[3] = monotonic_ns()
            self._show_collective(ticket)
            group, flags = shown[6], shown[8]
            assert isinstance(group, int)
            assert isinstance(flags, int)
            if not flags & _PAIR:
                self._groups[group - 1].finished += 1
                self._show_group(group - 1)
        if self._phase == STARTING:
            self.phase(IDLE)

    # --- messages of the script ----------------------------------------------------------------------

    def section(self, name: str, timeout_s: float, since: int) -> int:
        since = since or monotonic_ns()
        budget = int(timeout_s * 1e9) if timeout_s > 0 else 0
        self._write(SECTION_AT, NAMED.pack(since, budget, _cut(name, 104)))
        return since

    def message(self, text: str) -> None:
        self._write(MESSAGE_AT, MESSAGE.pack(monotonic_ns(), _cut(text, 240)))

    def error(self, text: str) -> None:
        self._write(ERROR_AT, ERROR.pack(monotonic_ns(), _cut(text, 368)))


def _cut(text: str, room: int) -> bytes:
    """Encode as UTF-8, truncated at a character boundary."""
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[:room].decode(errors="ignore").encode()
