"""Decodes the status page of a rank (shared memory); ddp/telemetry/contracts.py has the layout. Without I/O.

The rank writes while the agent reads, and does not wait. A copy of a block is valid only if its counter was even before
the copy and is the same afterwards. Otherwise the block is copied again. If that does not help (the writer died or was
stopped in the middle of a write), the previous content stays valid. So a block is old or new, never a mix.

The writer is a rank, whose memory may be corrupted: any content of its page is read without an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

from launcher.template.contracts import (
    ASYNC,
    BINS,
    COLLECTIVE_BLOCK,
    ERROR_BLOCK,
    GROUP_BLOCK,
    HEADER_BLOCK,
    MAGIC,
    MESSAGE_BLOCK,
    NUMBERED,
    PROGRESS_BLOCK,
    REPEATS,
    SECTION_BLOCK,
    SIZE,
    TOTALS_BLOCK,
    UNCAUGHT,
    VERSION,
    PageBlock,
)
from rendezvous.values.cause_text import place_of
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import PhaseTimes
from rendezvous.values.rank_view import (
    NO_REPEAT,
    Buckets,
    Collective,
    GroupView,
    Histogram,
    ProcessView,
    RankPhase,
    RankView,
    Repeat,
    Section,
    Totals,
)

_TRIES = 8
_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Block:
    """The position of a block, and the fields after its counter."""

    at: int
    fields: struct.Struct

    @property
    def end(self) -> int:
        return self.at + 8 + self.fields.size


HEADER = Block(HEADER_BLOCK.at, HEADER_BLOCK.packing)  # has no counter


def _blocks(of: PageBlock) -> tuple[Block, ...]:
    return tuple(Block(of.at + of.slot * place, of.packing) for place in range(of.many))


PROGRESS, SECTION, MESSAGE, ERROR = (
    _blocks(each)[0] for each in (PROGRESS_BLOCK, SECTION_BLOCK, MESSAGE_BLOCK, ERROR_BLOCK)
)
RING, GROUPS, (TOTALS,) = map(_blocks, (COLLECTIVE_BLOCK, GROUP_BLOCK, TOTALS_BLOCK))
BLOCKS = (PROGRESS, SECTION, MESSAGE, ERROR, *RING, *GROUPS, TOTALS)
_PLACE = {block.at: place for place, block in enumerate(BLOCKS)}


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Content of the page: the fields of each block without its counter, or zeros before the first valid copy."""

    head: bytes
    bodies: tuple[bytes, ...]  # in the order of BLOCKS


NOTHING = PageCopy(bytes(HEADER.fields.size), tuple(bytes(block.fields.size) for block in BLOCKS))


def header(wishes: int, repeat: Repeat = NO_REPEAT) -> bytes:
    """Return the initial content of a page."""
    return HEADER.fields.pack(MAGIC, VERSION, SIZE, wishes, 0, 0, repeat.steps, repeat.up_to)


def snapshot(look: Callable[[int, int], bytes], before: PageCopy = NOTHING) -> PageCopy:
    """`look(at, size)` copies bytes of the page. Copies must happen in the order of the calls."""
    head = look(0, HEADER.fields.size)
    if _writer(head) != _writer(before.head):
        before = NOTHING  # another process has claimed the page
    found = (_body(look, block) for block in BLOCKS)
    bodies = tuple(old if new is None else new for new, old in zip(found, before.bodies, strict=True))
    return PageCopy(head, bodies)


def _writer(head: bytes) -> tuple[int, int]:
    pid, opened_at = HEADER.fields.unpack(head)[4:6]
    return pid, opened_at


def _body(look: Callable[[int, int], bytes], block: Block) -> bytes | None:
    for _ in range(_TRIES):
        counter = look(block.at, 8)
        if _is_odd(counter):
            continue
        body = look(block.at + 8, block.fields.size)
        if look(block.at, 8) == counter:
            return body
    return None


def _is_odd(counter: bytes) -> bool:
    (number,) = struct.unpack("=Q", counter)
    return bool(number & 1)


# --- interpretation -----------------------------------------------------------------------------------


def view(seen: PageCopy, now_ns: int, rank: int, process: ProcessView) -> RankView:
    pid, _opened_at = _writer(seen.head)
    if not pid:
        return RankView(rank, process=process)
    return _Reading(seen, now_ns).view(rank, pid, process)


@dataclass(frozen=True, slots=True)
class _Reading:
    seen: PageCopy
    now_ns: int

    def _fields(self, block: Block) -> tuple[int, ...]:
        return block.fields.unpack(self.seen.bodies[_PLACE[block.at]])

    def _ago(self, at: int) -> float:
        return max(0, self.now_ns - at) / _SECOND if at else 0.0

    def view(self, rank: int, pid: int, process: ProcessView) -> RankView:
        number, account, since, step, step_since, last_ns, mean_ns, *rest = self._fields(PROGRESS)
        opened_at = _writer(self.seen.head)[1]
        message_at, message = self._timed_text(MESSAGE)
        error_at, error = self._timed_text(ERROR)
        collectives, times = self._collectives()
        moments = (since, step_since, rest[-3], rest[-2], message_at, error_at, *times)
        return RankView(
            rank=rank,
            pid=pid,
            known=True,
            phase=_phase(number),
            phase_s=self._ago(since),
            quiet_s=self._ago(max(moments)),
            step=_number(step),
            step_s=self._ago(step_since),
            last_step_s=last_ns / _SECOND,
            mean_step_s=mean_ns / _SECOND,
            phase_times=self._phase_times(account, since, rest[:12]),
            buckets=self._buckets(rest[12:18]),
            collectives=collectives,
            groups=self._groups(),
            group_timeout_s=rest[18] / _SECOND,
            section=self._section(),
            message=message,
            error=error,
            process=process,
            totals=self._totals(self._ago(opened_at)),
        )

    def _phase_times(self, now: int, since: int, spent: list[int]) -> tuple[tuple[RankPhase, float], ...]:
        times = {_phase(i): spent[i] / _SECOND for i in range(len(_PHASES))}
        times[_phase(now)] += self._ago(since)
        return tuple((phase, time) for phase, time in times.items() if time)

    def _totals(self, open_s: float) -> Totals:
        at_step, checkpoints, flags, *rest = self._fields(TOTALS)
        first_at, formed_at, total, *_reserved, step_ns, call_ns = rest[:8]
        *rest, hidden_ns = rest[8:]
        repeated, steps, calls = rest[:12], rest[12 : 12 + BINS], rest[12 + BINS :]
        return Totals(
            open_s=open_s,
            first_step_s=self._ago(first_at) if first_at else None,
            formed_s=self._ago(formed_at) if formed_at else None,
            checkpoints=checkpoints,
            checkpoint_step=_number(at_step),
            numbers_steps=bool(flags & NUMBERED),
            repeats=bool(flags & REPEATS),
            uncaught=bool(flags & UNCAUGHT),
            repeated=tuple((_phase(i), ns / _SECOND) for i, ns in enumerate(repeated) if ns),
            steps=Histogram(tuple(steps), step_ns / _SECOND),
            calls=Histogram(tuple(calls), call_ns / _SECOND),
            hidden_s=hidden_ns / _SECOND,
            total_steps=_number(total),
        )

    def _buckets(self, fields: list[int]) -> Buckets | None:
        of, launched, finished, _, launched_at, finished_at = fields
        if not of:
            return None
        return Buckets(of, launched, finished, self._ago(launched_at), self._ago(finished_at))

    def _section(self) -> Section | None:
        since, timeout_ns, name = self._fields(SECTION)
        text = _text(name)
        timeout_s = timeout_ns / _SECOND if timeout_ns else None
        return Section(text, timeout_s, self._ago(since)) if text else None

    def _timed_text(self, block: Block) -> tuple[int, str]:
        at, text = self._fields(block)
        return at, _text(text)

    def _groups(self) -> tuple[GroupView, ...]:
        shown = sorted(self._fields(block) for block in GROUPS)
        return tuple(
            GroupView(_text(name), size & 0x7FFF_FFFF, _text(members), _number(entered), _number(finished))
            for number, size, entered, finished, name, members in shown
            if number
        )

    def _collectives(self) -> tuple[tuple[Collective, ...], list[int]]:
        """Return the collectives, and all times in the ring buffer."""
        names = {number: _text(name) for number, *_, name, _ in map(self._fields, GROUPS)}
        shown = sorted(fields for fields in map(self._fields, RING) if fields[0])
        times = [at for fields in shown for at in (fields[2], fields[3])]
        return tuple(self._collective(fields, names) for fields in shown), times

    def _collective(self, fields: tuple[int, ...], names: dict[int, str]) -> Collective:
        number, seq, entered, finished, numel, shape, group, peer, flags, op, dtype = fields
        finished_s = self._ago(finished) if finished else None
        is_async = bool(flags & ASYNC)
        values = (
            _text(op),
            _text(dtype),
            _number(numel),
            shape,
            peer,
            is_async,
            self._ago(entered),
            finished_s,
        )
        return Collective(_number(number), names.get(group, ""), _number(seq), *values)


_PHASES = tuple(RankPhase)


def _phase(number: int) -> RankPhase:
    return _PHASES[number] if number < len(_PHASES) else RankPhase.IDLE


def _number(field: int) -> int:
    """Limit the value to the range of the message field."""
    return field & 0x7FFF_FFFF_FFFF_FFFF


def _text(field: int | bytes) -> str:
    assert isinstance(field, bytes)
    return field.partition(b"\0")[0].decode(errors="replace")


# --- as text ----------------------------------------------------------------------------------------


def in_words(rank: RankView) -> str:
    """Return where a rank is, or was: "in its backward pass, bucket 3 of 7". Return "" if the page does not show it."""
    section = rank.section.name if rank.section is not None else ""
    phase = RankPhase.SECTION if section else rank.phase
    words = [] if phase in _NOWHERE else [place_of(phase, section)]
    waiting = rank.waiting_in
    buckets = rank.buckets
    if buckets is not None and buckets.finished < buckets.of and rank.phase in _IN_BACKWARD:
        words.append(f"bucket {buckets.finished + 1} of {buckets.of}")
    elif waiting:
        words.append(f"waiting in {waiting[0].op} #{waiting[0].seq}")
    return ", ".join(words)


_IN_BACKWARD = (RankPhase.BACKWARD, RankPhase.COMMUNICATE)
_NOWHERE = (RankPhase.STARTING, RankPhase.IDLE, RankPhase.EXITING)


# --- phase times, which the service compares: see rendezvous/diagnosing/stragglers.py ---------------

_COLUMNS = {
    RankPhase.DATA: "data_s",
    RankPhase.FORWARD: "forward_s",
    RankPhase.BACKWARD: "backward_s",
    RankPhase.OPTIMIZER: "optimizer_s",
    RankPhase.IDLE: "idle_s",
    RankPhase.COMMUNICATE: "waiting_s",
}


def phase_times(views: Iterable[RankView]) -> tuple[PhaseTimes, ...]:
    """Return the phase times of ranks that finished a step. Checkpoints, evaluations and sections do not count."""
    return tuple(times_of(view) for view in views if view.known and view.process.alive and view.step > 0)


def times_of(view: RankView) -> PhaseTimes:
    spent = {_COLUMNS[phase]: seconds for phase, seconds in view.phase_times if phase in _COLUMNS}
    return PhaseTimes(view.rank, view.step, **spent)


# --- how far the ranks are, how fast, and how much time is left, in a few words for the progress line
#
# The slowest rank counts. The time left is known if the script tells how many steps it will take
# (`ddp.status(total=...)`). It is computed from the average of all steps but the first: over a long time the last
# steps are no better guess.

_STUCK_S = 10.0  # without a step, and ...
_STUCK_STEPS = 5  # ... for so many times the time of a step: a rate would be a thing of the past


def progress_in_words(views: Sequence[RankView]) -> str:
    """For example "step 120 of 5000, 3.2 steps/s, 25:25 left"; "" if no rank has finished a step."""
    shown = [view for view in views if view.known and view.process.alive]
    if not shown or not all(view.step for view in shown):
        return ""
    last = min(shown, key=lambda view: view.step)
    total = last.totals.total_steps
    parts = [f"step {last.step} of {total}" if total else f"step {last.step}"]
    step_s = max(view.mean_step_s for view in shown)
    if not step_s:
        return parts[0]
    if last.step_s > max(_STUCK_S, _STUCK_STEPS * step_s):
        return f"{parts[0]}, no step for {_clock(last.step_s)}"
    parts.append(f"{1 / step_s:.3g} steps/s" if step_s <= 1 else f"{step_s:.3g} s per step")
    return ", ".join([*parts, *_time_left(last, total)])


def _time_left(last: RankView, total: int) -> list[str]:
    steps = last.totals.steps
    measured = sum(steps.bins)
    if not measured or total <= last.step:
        return []
    return [f"{_clock((total - last.step) * steps.sum_s / measured)} left"]


def _clock(seconds: float) -> str:
    whole = int(min(seconds, 1e9))
    minutes = f"{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes.removeprefix("0")
