"""The writer of the status page in Python, used if the compiled writer (`_core/page.c`) is missing.

Both write the same bytes. Each block has a counter that is odd while the block changes; docs/status-page.md describes
the layout. A CPU may reorder stores, so a memory barrier must separate the stores to the counter from those to the
block. Python does not offer barriers, but releasing a lock and taking it again acts as one on every machine. So each
store happens under a lock that no other thread takes. Another lock serializes the threads of the writer.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from . import page_layout as layout
from .page_layout import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATE,
    EVALUATION,
    EXITING,
    FORWARD,
    IDLE,
    OPTIMIZER,
    STARTING,
)
from .page_threads import ShownThread, Threads

if TYPE_CHECKING:
    from collections.abc import Callable


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
        self._memory = mmap.mmap(file, layout.SIZE)
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
        self._repeat_steps, self._repeat_to = layout.REPEAT.unpack_from(self._memory, layout.REPEAT_AT)
        self._groups: list[layout.Group] = []
        self._collectives: dict[int, list[object]] = {}
        self._open: set[int] = set()  # asynchronous collectives of the ring that have not ended
        self._hidden_since = 0  # until then, hidden communication is counted
        self._claim()

    def _in_forked_child(self) -> None:
        self._forked = True

    def _claim(self) -> None:
        """Reset the page: another process may have written it, for example if the script runs programs in turn."""
        layout.PID.pack_into(self._memory, layout.PID_AT, 0)
        self._since = self._step_since = now = monotonic_ns()
        self._phase = self._account = STARTING  # the account: the phase to which the time since then counts
        self._phase_ns = [0] * 12
        self._totals = layout.Totals(layout.REPEATS if self._repeat_steps or self._repeat_to else 0)
        self._step = self._last_ns = self._mean_ns = 0
        self._group_timeout_ns = 0
        self._buckets = [
            0
        ] * 6  # count, launched, finished, unused; time of the last launch, of the last finish
        for at, block in (
            (layout.SECTION_AT, layout.NAMED),
            (layout.MESSAGE_AT, layout.MESSAGE),
            (layout.ERROR_AT, layout.ERROR),
        ):
            self._write(at, bytes(block.size))
        for at in range(layout.RING_AT, layout.GROUPS_AT + layout.GROUP_SLOTS * layout.SLOT, layout.SLOT):
            self._write(at, bytes(layout.SLOT - 8))
        self._show_progress()
        self._show_totals()
        layout.COUNTER.pack_into(self._memory, layout.OPENED_AT, now)
        layout.PID.pack_into(self._memory, layout.PID_AT, os.getpid())

    def _write(self, at: int, block: bytes) -> None:
        memory = self._memory
        odd = layout.COUNTER.unpack_from(memory, at)[0] | 1  # an earlier writer may have died here
        with self._lock:
            layout.COUNTER.pack_into(memory, at, odd)
        with self._lock:
            memory[at + 8 : at + 8 + len(block)] = block
        with self._lock:
            layout.COUNTER.pack_into(memory, at, odd + 1)

    # --- phases, steps, buckets ----------------------------------------------------------------------

    def _show_progress(self) -> None:
        times = (self._since, self._step, self._step_since, self._last_ns, self._mean_ns)
        block = layout.PROGRESS.pack(
            self._phase, self._account, *times, *self._phase_ns, *self._buckets, self._group_timeout_ns
        )
        self._write(layout.PROGRESS_AT, block)

    def _show_totals(self) -> None:
        self._write(layout.TOTALS_AT, self._totals.packed())

    @_whole
    def phase(self, number: int) -> int:
        if not STARTING <= number <= EXITING:
            raise ValueError(f"invalid phase {number}: not a number from {STARTING} to {EXITING}")
        if number == EXITING and hasattr(sys, "last_type"):  # set by the interpreter if nothing has caught it
            self._totals.flags |= layout.UNCAUGHT
            self._show_totals()
        own = self._threads.own
        before, own.phase = own.phase, number
        own.trains |= number == BACKWARD
        if number == CHECKPOINT != before:
            own.saves_step = self._step
        if self._shown.takes_over(own, number):
            self._write(layout.SECTION_AT, bytes(layout.NAMED.size))  # of the other thread
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
        if number in layout.PART_OF_A_STEP:
            self._moved = self._ever_moved = True

    def _account_of(self, phase: int) -> int:
        if self._evaluating and phase in layout.TRAINING:
            return EVALUATION
        # Until the first part of a step, the script still starts.
        return STARTING if self._last == STARTING and phase in (IDLE, COMMUNICATE) else phase

    def _final_account(self, following: int) -> int:
        """The code before a backward pass is the forward pass, also of a model that is not wrapped, and the loss."""
        account = self._account
        return (
            FORWARD
            if account == IDLE and following == BACKWARD and self._last in layout.IN_A_STEP
            else account
        )

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
        return now if now in layout.NAMED_PHASES or now == number or starting else self.phase(number)

    @_whole
    def back(self, before: int) -> None:
        now = self._threads.own.phase
        number = IDLE if before == STARTING != now else before
        if now not in layout.NAMED_PHASES and now != number:
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
            totals.steps[layout.bin_of(took)] += 1
            totals.step_sum_ns += took
        else:
            totals.first_step_at = now
        self._show_progress()
        self._end_repeating(now)
        self._show_totals()

    def _end_repeating(self, now: int) -> None:
        """Note the times until the steps were repeated that ranks before this one had finished, and that were lost."""
        totals, step = self._totals, self._step
        if totals.flags & layout.NUMBERED and self._repeat_to:
            over = step >= self._repeat_to
        else:  # a script that numbers its steps does so after its first step: until then, it may be at any of them
            over = step - self._steps_offset >= max(self._repeat_steps, self._repeat_to)
        if self._repeats_until:
            over = step - self._steps_offset >= self._repeats_until
        if totals.flags & layout.REPEATS and over:
            totals.flags &= ~layout.REPEATS
            spent = [ns + (now - self._since) * (at == self._account) for at, ns in enumerate(self._phase_ns)]
            totals.repeated_ns = [ns if at in layout.TRAINING else 0 for at, ns in enumerate(spent)]

    @_whole
    def number(self, number: int) -> None:
        self._steps_offset += number - self._step
        self._step = number
        self._show_progress()
        self._totals.flags |= layout.NUMBERED
        self._end_repeating(monotonic_ns())
        self._show_totals()

    @_whole
    def repeats(self, steps: int) -> None:
        self._repeats_until = self._step - self._steps_offset + steps
        self._totals.flags |= layout.REPEATS
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
        if len(self._groups) == layout.KNOWN_GROUPS:
            return layout.KNOWN_GROUPS  # enter() does not record it
        ranks = members.encode()
        self._groups.append(
            layout.Group(
                size, layout.cut(name, layout.LONGEST_NAME), ranks if len(ranks) <= layout.MEMBERS else b""
            )
        )
        return len(self._groups) - 1

    def _show_group(self, number: int) -> None:
        it = self._groups[number]
        block = layout.GROUP.pack(number + 1, it.size, it.entered, it.finished, it.name, it.members)
        self._write(layout.GROUPS_AT + number % layout.GROUP_SLOTS * layout.SLOT, block)

    @_whole
    def enter(
        self, group: int, op: str, dtype: str, numel: int, shape: int, peer: int, is_async: int, sequence: int
    ) -> int:
        """`sequence` 0: take the group's next number."""
        if group == layout.KNOWN_GROUPS:
            return 0
        known = self._groups[group]
        self._entered += 1
        if self._shown.shows(self._threads.own):
            self._moved = self._ever_moved = True
        flags = (layout.ASYNC if is_async else 0) | (layout.PAIR if sequence else 0)
        if not sequence:
            known.entered += 1
            sequence = known.entered
        self._show_group(group)
        facts = [numel, shape, group + 1, peer, flags, layout.cut(op, 20), layout.cut(dtype, 12)]
        now = monotonic_ns()
        self._count_hidden(now)
        self._open.discard(self._entered - layout.RING_SLOTS)  # it leaves the ring
        if is_async:
            self._open.add(self._entered)
        shown: list[object] = [self._entered, sequence, now, 0, *facts]
        self._collectives[self._entered % layout.RING_SLOTS] = shown
        self._show_collective(self._entered)
        return self._entered << 13 | group << 1 | bool(flags & layout.PAIR)

    def _show_collective(self, number: int) -> None:
        at = layout.RING_AT + number % layout.RING_SLOTS * layout.SLOT
        self._write(at, layout.COLLECTIVE.pack(*self._collectives[number % layout.RING_SLOTS]))

    @_whole
    def leave(self, ticket: int) -> None:
        if not ticket:
            return
        number, group, is_pair = ticket >> 13, ticket >> 1 & layout.KNOWN_GROUPS - 1, ticket & 1
        shown = self._collectives.get(number % layout.RING_SLOTS)
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
        totals.calls[layout.bin_of(now - entered_at)] += 1
        totals.call_sum_ns += now - entered_at
        self._show_totals()

    # --- messages of the script ----------------------------------------------------------------------

    @_whole
    def section(self, name: str, timeout_s: float, since: int) -> int:
        since = since or monotonic_ns()
        if self._shown.shows(self._threads.own):
            budget = int(timeout_s * 1e9) if timeout_s > 0 else 0
            self._write(layout.SECTION_AT, layout.NAMED.pack(since, budget, layout.cut(name, 104)))
        return since

    @_whole
    def message(self, text: str) -> None:
        self._write(layout.MESSAGE_AT, layout.MESSAGE.pack(monotonic_ns(), layout.cut(text, 240)))

    @_whole
    def error(self, text: str) -> None:
        self._write(layout.ERROR_AT, layout.ERROR.pack(monotonic_ns(), layout.cut(text, 368)))
