"""What a rank and the launcher agree on: the layout of the status page, and the variables that the launcher sets. Pure.

Both sides read this file. The library inside a rank imports it; the launcher, which must not import `ddp`, loads it by
its path (`launcher/template/contracts.py`). The C header of the writer, and the phases in docs/status-page.md, are
made from it: `make layout`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# --- variables in the environment of a rank ---------------------------------------------------------

STATUS_PAGE = "DDP_STATUS_PAGE"  # the file of the status page
GUARD = "DDP_GUARD"  # the socket of the agent for the guard of the rank
GENERATION = "DDP_GENERATION"
JOINS = "DDP_JOINS"  # 1: the rank starts while ranks of this generation have kept their processes
RANK_DIR = "DDP_RANK_DIR"
SCRATCH = "DDP_SCRATCH"
CHECKPOINT_REQUEST = "DDP_CHECKPOINT_REQUEST"
RESUME_PATH = "DDP_RESUME_PATH"  # what ranks of an earlier generation have saved after its failure
RESUME_FILE = "DDP_RESUME_FILE"  # `--resume-file`: names the same for a job that starts later
# Files in the folder of DDP_SCRATCH, with the generation behind: what a rank has saved, and that one is saving.
SAVED_STATE, SAVING = "saved-", "saving-"
EXCLUDE_NODE = "exclude-node"  # a file there: why a rank asks to leave out its node
REDUNDANCY = "DDP_REDUNDANCY"
TOPOLOGY = "DDP_TOPOLOGY"
DEBUG = "DDP_DEBUG"  # what a rank does while one of them is debugged: one of the two below, or an address
DEBUG_IN_TERMINAL, DEBUG_OTHER = "terminal", "other"
STEP_PROFILE, STEP_PROFILE_STEPS = "DDP_STEP_PROFILE", "DDP_STEP_PROFILE_STEPS"  # of `ddp-launch plan`
REHEARSAL = "DDP_REHEARSAL"  # of `ddp-launch rehearse`: where its ranks record their steps
SHARE_COMPILED = "DDP_SHARE_COMPILED"  # `--share-compiled`
CALL_FOLDER = "DDP_CALL_FOLDER"  # from `ddp.launch` to its ranks: the folder with the function
ENDING_FILE = "DDP_ENDING_FILE"  # from `ddp.launch` to the command: where it writes how the job has ended
BACKEND, TIMEOUT_S, NATIVE = "DDP_BACKEND", "DDP_TIMEOUT_S", "DDP_NATIVE"  # from the user to the library

# --- the status page -------------------------------------------------------------------------------

SIZE = 4096
# Behind the page: what `ddp.log` was given. A number counts all bytes that were ever written to a ring. Its lines are
# JSON, each with a step and numbers by name.
VALUES_AT, VALUES_COUNTER, VALUES_ROOM = SIZE, 8, 64 * 1024
RING_AT = VALUES_AT + VALUES_COUNTER
VALUES_END = RING_AT + VALUES_ROOM


def ring_lines(ring: bytes, begin: int, end: int, end_after: int) -> list[bytes]:
    """The whole lines among the bytes from `begin` to `end`. Until `end_after`, the writer has gone on meanwhile.

    It may be writing one line more, which is not counted yet: at most a quarter of the ring.
    """
    oldest = max(begin, end_after - len(ring) * 3 // 4)
    if not begin <= oldest < end:
        return []
    at = oldest % len(ring)
    data = (ring[at:] + ring[:at])[: end - oldest]
    if oldest > begin:
        data = data.partition(b"\n")[2]
    return data.split(b"\n")[:-1]


MAGIC, VERSION = b"ddp-page", 2
# Their place is their number on the page; `RankPhase` has the same names.
PHASES = (
    *("starting", "data", "forward", "backward", "communicate", "optimizer"),
    *("checkpoint", "evaluation", "section", "idle", "exiting"),
)
STARTING, DATA, FORWARD, BACKWARD, COMMUNICATE, OPTIMIZER = range(6)
CHECKPOINT, EVALUATION, SECTION, IDLE, EXITING = range(6, 11)
ROOM_FOR_PHASES, BINS = 12, 24
KNOWN_GROUPS = 4096  # of a process; the collectives of further ones are not recorded
TRACE_COLLECTIVES = 1  # bit of the requests
ASYNC, PAIR = 1, 2  # bits of a collective; a pair is a send or a receive, and is counted separately
NUMBERED, REPEATS, UNCAUGHT = 1, 2, 4  # bits of the totals


class Field(NamedTuple):
    name: str  # in C
    kind: str  # Q, I, i: numbers of 8, 4 and 4 bytes, as in the module `struct`; s: text
    words: str
    many: int = 1  # numbers, or bytes of text

    @property
    def size(self) -> int:
        return self.many * {"Q": 8, "I": 4, "i": 4, "s": 1}[self.kind]


class PageBlock(NamedTuple):
    """A part of the page that is written at once. `many` of it follow each other, `slot` bytes apart."""

    name: str  # in C
    at: int
    fields: tuple[Field, ...]
    heading: str = ""  # in the documents
    many: int = 1
    slot: int = 0
    has_counter: bool = True

    @property
    def first_field_at(self) -> int:
        return self.at + 8 * self.has_counter

    @property
    def end(self) -> int:
        return self.first_field_at + sum(field.size for field in self.fields)

    @property
    def packing(self) -> struct.Struct:
        """Of the fields, without the counter."""
        return struct.Struct("=" + "".join(f"{field.many}{field.kind}" for field in self.fields))


HEADER_BLOCK = PageBlock(
    "header",
    0,
    (
        Field("magic", "s", f"`{MAGIC.decode()}`", len(MAGIC)),
        Field("version", "I", "version of the layout"),
        Field("size", "I", "size of the page"),
        Field("wishes", "I", "requests of the agent; bit 0: record collectives"),
        Field("pid", "I", "pid of the writer; 0: no writer yet"),
        Field("opened_at", "Q", "time when the writer opened the page"),
        Field("repeat_steps", "Q", "from the agent: lost steps that the rank repeats, by its own count"),
        Field(
            "repeat_to",
            "Q",
            "from the agent: the step up to which it repeats, as the script numbers its steps",
        ),
    ),
    "**header**, without a counter",
    has_counter=False,
)
PROGRESS_BLOCK = PageBlock(
    "progress",
    64,
    (
        Field("phase", "I", "phase; the numbers are below"),
        Field(
            "account",
            "I",
            "phase to which the time since the start of the phase counts: `evaluation`, or the phase itself",
        ),
        Field("phase_since", "Q", "start time of the phase"),
        Field("step", "Q", "finished steps"),
        Field("step_since", "Q", "end time of the last step"),
        Field("last_step_ns", "Q", "duration of the last step, in nanoseconds"),
        Field("mean_step_ns", "Q", "moving average of the step duration, without the first step"),
        Field("phase_ns", "Q", "nanoseconds spent in each phase, without the current one", ROOM_FOR_PHASES),
        Field("buckets", "I", "number of buckets in the backward pass"),
        Field("launched", "I", "launched buckets"),
        Field("finished", "I", "finished buckets"),
        Field("unused", "I", "reserved"),
        Field("launched_at", "Q", "time of the last bucket launch"),
        Field("finished_at", "Q", "time when the last bucket finished"),
        Field("group_timeout_ns", "Q", "longest timeout of the process groups of the rank, in nanoseconds"),
    ),
)
SECTION_BLOCK = PageBlock(
    "section",
    256,
    (
        Field("since", "Q", "start time of the section"),
        Field("timeout_ns", "Q", "timeout in nanoseconds; 0: no timeout"),
        Field("name", "s", "name; empty: the script is not in a section", 104),
    ),
)
MESSAGE_BLOCK = PageBlock(
    "message",
    384,
    (Field("at", "Q", "time of the message"), Field("text", "s", "text passed to `ddp.status`", 240)),
)
ERROR_BLOCK = PageBlock(
    "error", 640, (Field("at", "Q", "time of the error"), Field("text", "s", "text of the error", 368))
)
COLLECTIVE_BLOCK = PageBlock(
    "collective",
    1024,
    (
        Field("number", "Q", "number among all collectives of this rank, from 1; 0: the slot is empty"),
        Field(
            "group_sequence",
            "Q",
            "number in its group, from 1; for a send or receive, number among those with the same peer",
        ),
        Field("entered_at", "Q", "time when the rank entered it"),
        Field("finished_at", "Q", "time when it finished"),
        Field("numel", "Q", "number of elements"),
        Field("shape", "I", "hash of the tensor shapes"),
        Field("group", "I", "number of the group on this rank, from 1"),
        Field("peer", "i", "global rank of the root or peer; -1: no root or peer"),
        Field("flags", "I", "bit 0: asynchronous; bit 1: send or receive"),
        Field("op", "s", "operation: `all_reduce`, ...", 20),
        Field("dtype", "s", "type: `float32`, ...; `?`: tensors of a class that computes its properties", 12),
    ),
    "**collectives**: 16 of 96 bytes; collective number n is in slot n mod 16",
    many=16,
    slot=96,
)
GROUP_BLOCK = PageBlock(
    "group",
    2560,
    (
        Field("group", "I", "number g of the group; 0: the slot is empty"),
        Field("size", "I", "number of ranks in the group"),
        Field("entered", "Q", "collectives that the rank entered in this group"),
        Field("finished", "Q", "collectives that finished"),
        Field("name", "s", "name of the group in torch", 40),
        Field("members", "s", "ranks of the group: `0-3`, `0-6/2`, `0,3,5`; empty: the list is too long", 24),
    ),
    "**groups**: 12 of 96 bytes; group g is in slot (g - 1) mod 12; a slot shows the group that was used last",
    many=12,
    slot=96,
)
LONGEST_GROUP_NAME = 40
TOTALS_BLOCK = PageBlock(
    "totals",
    3712,
    (
        Field("checkpoint_step", "Q", "finished steps when the last checkpoint began"),
        Field("checkpoints", "I", "number of checkpoints"),
        Field(
            "flags",
            "I",
            "bit 0: the script numbers its steps; bit 1: the rank repeats lost steps; bit 2: it exits after an "
            "exception that nothing has caught",
        ),
        Field("first_step_at", "Q", "time when the first step ended"),
        Field("formed_at", "Q", "time when the first collective finished, which forms the first group"),
        Field("total_steps", "Q", "number of steps that the script will take; 0: unknown"),
        Field("unused", "Q", "reserved", 3),
        Field("step_sum_ns", "Q", "sum of the durations of all steps but the first"),
        Field("call_sum_ns", "Q", "sum of the durations of the finished collectives"),
        Field(
            "repeated_ns",
            "Q",
            "nanoseconds spent in each phase until the lost steps were repeated",
            ROOM_FOR_PHASES,
        ),
        Field(
            "steps",
            "I",
            "histogram of these steps: durations up to 15.625 µs, 31.25 µs, ..., 65.536 s, and longer",
            BINS,
        ),
        Field("calls", "I", "the same for collectives", BINS),
        Field(
            "hidden_ns",
            "Q",
            "nanoseconds in which an asynchronous collective ran and the rank did not wait for it",
        ),
    ),
)
PAGE_BLOCKS = (
    *(HEADER_BLOCK, PROGRESS_BLOCK, SECTION_BLOCK, MESSAGE_BLOCK, ERROR_BLOCK),
    *(COLLECTIVE_BLOCK, GROUP_BLOCK, TOTALS_BLOCK),
)
