"""The layout of the status page, as docs/status-page.md describes it, and what a writer in Python keeps beside it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

STARTING, DATA, FORWARD, BACKWARD, COMMUNICATE, OPTIMIZER, CHECKPOINT = range(7)
EVALUATION, SECTION, IDLE, EXITING = range(7, 11)
PART_OF_A_STEP = range(DATA, COMMUNICATE + 1)
NAMED_PHASES = (CHECKPOINT, EVALUATION, SECTION)
TRAINING = (*range(DATA, OPTIMIZER + 1), IDLE)
IN_A_STEP = (DATA, FORWARD, BACKWARD, OPTIMIZER)

SIZE = 4096
COUNTER = struct.Struct("=Q")
PID = struct.Struct("=I")
PID_AT, OPENED_AT = 20, 24
REPEAT_AT, REPEAT = 32, struct.Struct("=2Q")
PROGRESS_AT, PROGRESS = 64, struct.Struct("=II5Q12Q4I3Q")
SECTION_AT, NAMED = 256, struct.Struct("=QQ104s")
MESSAGE_AT, MESSAGE = 384, struct.Struct("=Q240s")
ERROR_AT, ERROR = 640, struct.Struct("=Q368s")
RING_AT, RING_SLOTS, COLLECTIVE = 1024, 16, struct.Struct("=5QIIiI20s12s")
GROUPS_AT, GROUP_SLOTS, GROUP = 2560, 12, struct.Struct("=II2Q40s24s")
TOTALS_AT, TOTALS = 3712, struct.Struct("=QII8Q12Q24I24IQ")
BINS = 24
NUMBERED, REPEATS, UNCAUGHT = 1, 2, 4  # flags of the totals
SLOT = 96
ASYNC, PAIR = 1, 2  # a PAIR is a send or a receive, and is counted separately
LONGEST_NAME, MEMBERS = 40, 24
KNOWN_GROUPS = 4096  # of a process; the collectives of further ones are not recorded


@dataclass(slots=True)
class Group:
    size: int
    name: bytes
    members: bytes
    entered: int = 0
    finished: int = 0


@dataclass(slots=True)
class Totals:
    """What has happened since the page was opened."""

    flags: int = 0
    checkpoint_step: int = 0
    checkpoints: int = 0
    first_step_at: int = 0
    formed_at: int = 0  # when the first call, which forms the first group, finished
    total_steps: int = 0
    step_sum_ns: int = 0
    call_sum_ns: int = 0
    repeated_ns: list[int] = field(default_factory=lambda: [0] * 12)
    steps: list[int] = field(default_factory=lambda: [0] * BINS)
    calls: list[int] = field(default_factory=lambda: [0] * BINS)
    hidden_ns: int = 0  # an asynchronous collective ran, and the rank did not wait for it

    def packed(self) -> bytes:
        reserved = (0, 0, 0)
        times = (self.first_step_at, self.formed_at, self.total_steps, *reserved)
        sums = (self.step_sum_ns, self.call_sum_ns)
        head = (self.checkpoint_step, self.checkpoints, self.flags)
        return TOTALS.pack(*head, *times, *sums, *self.repeated_ns, *self.steps, *self.calls, self.hidden_ns)


def bin_of(took_ns: int) -> int:
    """The bins of a histogram: up to 15.625 us, then twice as much each time, the last one without a limit."""
    return min(BINS - 1, max(0, (-(-took_ns // 15625) - 1).bit_length()))


def cut(text: str, room: int) -> bytes:
    """Encode as UTF-8, truncated at a character boundary."""
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[:room].decode(errors="ignore").encode()
