"""The layout of the status page, and its writer in Python, used if the compiled writer (`_core/page.c`) is missing.

Both writers write the same bytes. Each block has a counter that is odd while the block changes; docs/status-page.md
describes the layout. A CPU may reorder stores, so a memory barrier must separate the stores to the counter from those
to the block. Python does not offer barriers, but releasing a lock and taking it again acts as one on every machine. So
each store happens under a lock that no other thread takes. Another lock serializes the threads of the writer.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import threading
import weakref
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# --- the layout of the page ------------------------------------------------------------------------
#
# The layout of the status page, as docs/status-page.md describes it, and what a writer in Python keeps beside it.

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


# --- threads, and the one whose phase is shown -----------------------------------------------------
#
# The threads that write the status page, and the one whose phase it shows: the rule of `_core/page.c`, in Python.


class Thread:
    """A thread that writes, with the phase that it is in."""

    def __init__(self) -> None:
        self.phase = IDLE
        self.trains = False  # it has begun a backward pass
        self.saves_step = 0  # finished steps when its checkpoint began


class Threads(threading.local):
    def __init__(self) -> None:
        self.own = Thread()


class ShownThread:
    """The page shows the thread that opened it, until another one trains while this one does not."""

    def __init__(self, opener: Thread) -> None:
        opener.phase = STARTING
        self._opener = self._shown = weakref.ref(opener)
        self._trains = False

    def shows(self, thread: Thread) -> bool:
        return self._shown() is thread

    def takes_over(self, thread: Thread, phase: int) -> bool:
        """Whether another thread than before is shown from now on, because it enters this phase."""
        part_of_training, other = phase in (BACKWARD, OPTIMIZER), self._shown()
        is_free = other is None or phase == EXITING or (part_of_training and not self._trains)
        may = is_free or part_of_training if thread is self._opener() else is_free and part_of_training
        if other is not thread and may:
            self._shown, self._trains = weakref.ref(thread), False
        if self.shows(thread):
            self._trains |= part_of_training
        return other is not thread and may


# --- the writer ------------------------------------------------------------------------------------


def _whole(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without another thread in between. A signal handler may write in the middle of a write, so the lock nests."""

    @functools.wraps(method)
    def write(self: Page, *args: Any) -> Any:
        if self._forked:
            return 0
        with self._threads_lock:
            return method(self, *args)

    return write


class Page:
    """Same interface as `ddp.telemetry._page.Page`, and the same rule whose phase is shown."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, SIZE)
        self._lock = threading.RLock()
        self._threads_lock = threading.RLock()
        self._threads = Threads()
        self._shown = ShownThread(self._threads.own)
        self._forked = False
        os.register_at_fork(after_in_child=self._in_forked_child)
        self._entered = 0
        self._moved = self._ever_moved = False
        self._steps_offset = 0
        self._repeats_until = 0  # by our count; 0: not paused so far, and the agent's numbers count
        self._evaluating = False  # gradients are off: what would be part of a step is part of an evaluation
        self._last = STARTING  # the last phase that was neither IDLE nor COMMUNICATE
        self._repeat_steps, self._repeat_to = REPEAT.unpack_from(self._memory, REPEAT_AT)
        self._groups: list[Group] = []
        self._collectives: dict[int, list[object]] = {}
        self._open: set[int] = set()  # asynchronous collectives of the ring that have not ended
        self._hidden_since = 0  # until then, hidden communication is counted
        self._claim()

    def _in_forked_child(self) -> None:
        self._forked = True

    def _claim(self) -> None:
        """Reset the page: another process may have written it, for example if the script runs programs in turn."""
        PID.pack_into(self._memory, PID_AT, 0)
        self._since = self._step_since = now = monotonic_ns()
        self._phase = self._account = STARTING  # the account: the phase to which the time since then counts
        self._phase_ns = [0] * 12
        self._totals = Totals(REPEATS if self._repeat_steps or self._repeat_to else 0)
        self._step = self._last_ns = self._mean_ns = 0
        self._group_timeout_ns = 0
        self._buckets = [
            0
        ] * 6  # count, launched, finished, unused; time of the last launch, of the last finish
        for at, block in (
            (SECTION_AT, NAMED),
            (MESSAGE_AT, MESSAGE),
            (ERROR_AT, ERROR),
        ):
            self._write(at, bytes(block.size))
        for at in range(RING_AT, GROUPS_AT + GROUP_SLOTS * SLOT, SLOT):
            self._write(at, bytes(SLOT - 8))
        self._show_progress()
        self._show_totals()
        COUNTER.pack_into(self._memory, OPENED_AT, now)
        PID.pack_into(self._memory, PID_AT, os.getpid())

    def _write(self, at: int, block: bytes) -> None:
        memory = self._memory
        odd = COUNTER.unpack_from(memory, at)[0] | 1  # an earlier writer may have died here
        with self._lock:
            COUNTER.pack_into(memory, at, odd)
        with self._lock:
            memory[at + 8 : at + 8 + len(block)] = block
        with self._lock:
            COUNTER.pack_into(memory, at, odd + 1)

    # --- phases, steps, buckets ----------------------------------------------------------------------

    def _show_progress(self) -> None:
        times = (self._since, self._step, self._step_since, self._last_ns, self._mean_ns)
        block = PROGRESS.pack(
            self._phase, self._account, *times, *self._phase_ns, *self._buckets, self._group_timeout_ns
        )
        self._write(PROGRESS_AT, block)

    def _show_totals(self) -> None:
        self._write(TOTALS_AT, self._totals.packed())

    @_whole
    def phase(self, number: int) -> int:
        if not STARTING <= number <= EXITING:
            raise ValueError(f"invalid phase {number}: not a number from {STARTING} to {EXITING}")
        if number == EXITING and hasattr(sys, "last_type"):  # set by the interpreter if nothing has caught it
            self._totals.flags |= UNCAUGHT
            self._show_totals()
        own = self._threads.own
        before, own.phase = own.phase, number
        own.trains |= number == BACKWARD
        if number == CHECKPOINT != before:
            own.saves_step = self._step
        if self._shown.takes_over(own, number):
            self._write(SECTION_AT, bytes(NAMED.size))  # of the other thread
        if self._shown.shows(own):
            self._show_phase(number)
        if before == CHECKPOINT != number:
            self._totals.checkpoint_step = own.saves_step
            self._totals.checkpoints += 1
            self._show_totals()
        return before

    def _show_phase(self, number: int) -> None:
        now = monotonic_ns()
        if number in (BACKWARD, OPTIMIZER):
            self._evaluating = False
        self._count_hidden(now)
        self._phase_ns[self._final_account(number)] += now - self._since
        if number not in (IDLE, COMMUNICATE):
            self._last = number
        self._phase, self._account, self._since = number, self._account_of(number), now
        self._show_progress()
        if number in PART_OF_A_STEP:
            self._moved = self._ever_moved = True

    def _account_of(self, phase: int) -> int:
        if self._evaluating and phase in TRAINING:
            return EVALUATION
        # Until the first part of a step, the script still starts.
        return STARTING if self._last == STARTING and phase in (IDLE, COMMUNICATE) else phase

    def _final_account(self, following: int) -> int:
        """The code before a backward pass is the forward pass, also of a model that is not wrapped, and the loss."""
        account = self._account
        return FORWARD if account == IDLE and following == BACKWARD and self._last in IN_A_STEP else account

    @_whole
    def evaluates(self, yes: bool) -> None:
        """Without gradients, nothing is a part of a training step. Only what the time counts as changes."""
        if self._shown.shows(self._threads.own) and self._evaluating != bool(yes):
            now, self._evaluating = monotonic_ns(), bool(yes)
            self._count_hidden(now)
            self._phase_ns[self._account] += now - self._since
            self._account, self._since = self._account_of(self._phase), now
            self._show_progress()

    @_whole
    def awaits(self) -> None:
        """The rest of this backward pass waits for collectives. Only what the time counts as changes."""
        if self._phase == BACKWARD == self._account:
            now = monotonic_ns()
            self._count_hidden(now)
            self._phase_ns[BACKWARD] += now - self._since
            self._account, self._since = COMMUNICATE, now
            self._show_progress()

    @_whole
    def mark(self, number: int) -> int:
        """Enter a phase, but do not replace a phase that the script has named.

        Before the first step, communication is part of the phase STARTING.
        """
        now = self._threads.own.phase
        starting = now == STARTING and number == COMMUNICATE
        return now if now in NAMED_PHASES or now == number or starting else self.phase(number)

    @_whole
    def back(self, before: int) -> None:
        now = self._threads.own.phase
        number = IDLE if before == STARTING != now else before
        if now not in NAMED_PHASES and now != number:
            self.phase(number)

    @_whole
    def step(self) -> None:
        if self._ever_moved and not self._moved:
            return  # a second optimizer in the same step
        if not self._shown.shows(self._threads.own) and self._threads.own.trains:
            return  # this thread trains another model, beside the one that is shown
        now = monotonic_ns()
        took, self._step_since, self._moved = now - self._step_since, now, False
        self._step += 1
        self._last_ns = took
        totals = self._totals
        if self._step - self._steps_offset > 1:
            mean = self._mean_ns
            self._mean_ns = mean + (took >> 3) - (mean >> 3) if mean else took
            totals.steps[bin_of(took)] += 1
            totals.step_sum_ns += took
        else:
            totals.first_step_at = now
        self._show_progress()
        self._end_repeating(now)
        self._show_totals()

    def _end_repeating(self, now: int) -> None:
        """Note the times until the steps were repeated that ranks before this one had finished, and that were lost."""
        totals, step = self._totals, self._step
        if totals.flags & NUMBERED and self._repeat_to:
            over = step >= self._repeat_to
        else:  # a script that numbers its steps does so after its first step: until then, it may be at any of them
            over = step - self._steps_offset >= max(self._repeat_steps, self._repeat_to)
        if self._repeats_until:
            over = step - self._steps_offset >= self._repeats_until
        if totals.flags & REPEATS and over:
            totals.flags &= ~REPEATS
            spent = [ns + (now - self._since) * (at == self._account) for at, ns in enumerate(self._phase_ns)]
            totals.repeated_ns = [ns if at in TRAINING else 0 for at, ns in enumerate(spent)]

    @_whole
    def number(self, number: int) -> None:
        self._steps_offset += number - self._step
        self._step = number
        self._show_progress()
        self._totals.flags |= NUMBERED
        self._end_repeating(monotonic_ns())
        self._show_totals()

    @_whole
    def repeats(self, steps: int) -> None:
        self._repeats_until = self._step - self._steps_offset + steps
        self._totals.flags |= REPEATS
        self._show_totals()

    @_whole
    def total(self, steps: int) -> None:
        self._totals.total_steps = steps
        self._show_totals()

    @_whole
    def buckets(self, of: int, launched: int, finished: int) -> None:
        before, now = self._buckets, monotonic_ns()
        launched_at = now if launched != before[1] else before[4]
        finished_at = now if finished != before[2] else before[5]
        self._buckets = [of, launched, finished, 0, launched_at, finished_at]
        self._show_progress()

    @_whole
    def group_timeout(self, timeout_s: float) -> None:
        longest = int(min(max(timeout_s, 0.0), 1e9) * 1e9)
        if longest > self._group_timeout_ns:
            self._group_timeout_ns = longest
            self._show_progress()

    # --- groups and collectives ----------------------------------------------------------------------

    @_whole
    def group(self, name: str, size: int, members: str) -> int:
        if len(self._groups) == KNOWN_GROUPS:
            return KNOWN_GROUPS  # enter() does not record it
        ranks = members.encode()
        self._groups.append(Group(size, cut(name, LONGEST_NAME), ranks if len(ranks) <= MEMBERS else b""))
        return len(self._groups) - 1

    def _show_group(self, number: int) -> None:
        it = self._groups[number]
        block = GROUP.pack(number + 1, it.size, it.entered, it.finished, it.name, it.members)
        self._write(GROUPS_AT + number % GROUP_SLOTS * SLOT, block)

    @_whole
    def enter(
        self, group: int, op: str, dtype: str, numel: int, shape: int, peer: int, is_async: int, sequence: int
    ) -> int:
        """`sequence` 0: take the group's next number."""
        if group == KNOWN_GROUPS:
            return 0
        known = self._groups[group]
        self._entered += 1
        if self._shown.shows(self._threads.own):
            self._moved = self._ever_moved = True
        flags = (ASYNC if is_async else 0) | (PAIR if sequence else 0)
        if not sequence:
            known.entered += 1
            sequence = known.entered
        self._show_group(group)
        facts = [numel, shape, group + 1, peer, flags, cut(op, 20), cut(dtype, 12)]
        now = monotonic_ns()
        self._count_hidden(now)
        self._open.discard(self._entered - RING_SLOTS)  # it leaves the ring
        if is_async:
            self._open.add(self._entered)
        shown: list[object] = [self._entered, sequence, now, 0, *facts]
        self._collectives[self._entered % RING_SLOTS] = shown
        self._show_collective(self._entered)
        return self._entered << 13 | group << 1 | bool(flags & PAIR)

    def _show_collective(self, number: int) -> None:
        at = RING_AT + number % RING_SLOTS * SLOT
        self._write(at, COLLECTIVE.pack(*self._collectives[number % RING_SLOTS]))

    @_whole
    def leave(self, ticket: int) -> None:
        if not ticket:
            return
        number, group, is_pair = ticket >> 13, ticket >> 1 & KNOWN_GROUPS - 1, ticket & 1
        shown = self._collectives.get(number % RING_SLOTS)
        if shown is not None and shown[0] == number:
            if shown[3]:
                return
            shown[3] = now = monotonic_ns()
            self._count_hidden(now)
            self._open.discard(number)
            self._show_collective(number)
            self._count_call(shown[2], now)
        if not is_pair:
            self._groups[group].finished += 1
            self._show_group(group)
        if self._threads.own.phase == STARTING:
            self.phase(IDLE)

    @_whole
    def forget(self) -> None:
        """The groups before this are gone, and so are their collectives."""
        self._count_hidden(monotonic_ns())
        self._open.clear()

    def _count_hidden(self, now: int) -> None:
        """Call this before what decides about it changes: the account of the time, and the collectives that run."""
        if self._open and COMMUNICATE not in (self._phase, self._account):
            self._totals.hidden_ns += now - self._hidden_since
            self._show_totals()
        self._hidden_since = now

    def _count_call(self, entered_at: object, now: int) -> None:
        assert isinstance(entered_at, int)
        totals = self._totals
        totals.formed_at = totals.formed_at or now
        totals.calls[bin_of(now - entered_at)] += 1
        totals.call_sum_ns += now - entered_at
        self._show_totals()

    # --- messages of the script ----------------------------------------------------------------------

    @_whole
    def section(self, name: str, timeout_s: float, since: int) -> int:
        since = since or monotonic_ns()
        if self._shown.shows(self._threads.own):
            budget = int(timeout_s * 1e9) if timeout_s > 0 else 0
            self._write(SECTION_AT, NAMED.pack(since, budget, cut(name, 104)))
        return since

    @_whole
    def message(self, text: str) -> None:
        self._write(MESSAGE_AT, MESSAGE.pack(monotonic_ns(), cut(text, 240)))

    @_whole
    def error(self, text: str) -> None:
        self._write(ERROR_AT, ERROR.pack(monotonic_ns(), cut(text, 368)))
