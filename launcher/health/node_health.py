"""The health of this node: compares two readings and reports changes. Pure.

A `NodeReading` holds what can be read in a millisecond; counters stay counters. `judge` compares it with the reading
before and reports what is wrong now. Each complaint has two thresholds, one to begin and a lower one to end, so that a
value near a threshold is not reported again and again. A value that may be a spike must be present in two consecutive
readings. The begin and the end of a complaint are each reported once. An event (a process killed for memory, an Xid)
stays among the complaints for a while, and its end is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GIB = 1 << 30
MIB = 1 << 20

MEMORY_HIGH, MEMORY_FINE = 0.95, 0.90
MEMORY_WORTH_TELLING = 0.85  # in the report of a rank that died
_STALLED, _UNSTALLED = 20.0, 5.0  # % of time in which nothing ran because memory ran short
_SWAPPING, _CALM = 10.0 * MIB, 1.0 * MIB  # a second
_THROTTLED, _FREE = 0.25, 0.05  # of the scheduler's periods
_NIC_ERRORS, _NIC_QUIET = 1.0, 0.1  # a second
_NIC_DROPS, _NIC_FEW = 100.0, 10.0
_DISK_SHARE, _DISK_BYTES = 0.02, 2 * GIB  # less than both is too little ...
_DISK_ENOUGH = 1.5  # ... and this much more is enough
_EVENT_S = 600.0
_LOOKS = 2  # running, for what may be a spike
_FRESH_S = 30.0


@dataclass(frozen=True, slots=True)
class Memory:
    """`used` without what the kernel can drop at once."""

    whose: str  # "the cgroup's limit", "the machine's memory"
    used: int
    limit: int
    oom_kills: int = 0

    @property
    def share(self) -> float:
        return self.used / self.limit if self.limit else 0.0


@dataclass(frozen=True, slots=True)
class Throttling:
    periods: int
    throttled: int
    cpus: float = 0.0  # the quota


@dataclass(frozen=True, slots=True)
class Nic:
    name: str
    errors: int
    drops: int
    carrier: bool


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    utilisation: int = 0  # %
    temperature: int = 0
    memory_used: int = 0
    memory_total: int = 0
    slowed_by: tuple[str, ...] = ()  # what holds its clocks down that is no policy: heat, a power shortage
    ecc_uncorrected: int = 0  # since the driver was loaded
    xids: tuple[int, ...] = ()  # since the look before
    lost: str = ""  # it does not answer, and why


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class NodeReading:
    at: float
    memory: Memory | None = None  # where it is tightest
    stalled: float = 0.0  # %
    swapped: int = 0  # bytes in and out, counted since the machine started
    throttling: Throttling | None = None
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    disks: tuple[Disk, ...] = ()


@dataclass(frozen=True, slots=True)
class Complaint:
    text: str
    since: float
    until: float | None = None  # of what happened: when it is no longer mentioned


@dataclass(frozen=True, slots=True)
class Health:
    last: NodeReading | None = None
    complaints: Mapping[str, Complaint] = field(default_factory=dict)
    suspected: Mapping[str, int] = field(default_factory=dict)  # how many looks running
    up: tuple[str, ...] = ()  # interfaces that have had a carrier

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(complaint.text for complaint in self.complaints.values())


@dataclass(frozen=True, slots=True)
class _Sign:
    """The evidence of one reading for one complaint."""

    key: str
    bad: bool  # enough for a complaint to begin
    fine: bool  # enough for it to end
    text: str
    over: str  # the text that reports its end
    may_be_a_spike: bool = True


@dataclass(frozen=True, slots=True)
class _Happened:
    key: str
    text: str


def judge(health: Health, now: NodeReading) -> tuple[Health, tuple[str, ...]]:
    """Return the health now, and one line for each change."""
    before = health.last
    complaints, suspected = dict(health.complaints), dict(health.suspected)
    news: list[str] = []
    for sign in _signs(health, before, now):
        if sign.key in complaints:
            if sign.fine:
                del complaints[sign.key]
                news.append(sign.over)
            continue
        suspected[sign.key] = suspected.get(sign.key, 0) + 1 if sign.bad else 0
        if sign.bad and suspected[sign.key] >= (_LOOKS if sign.may_be_a_spike else 1):
            complaints[sign.key] = Complaint(sign.text, now.at)
            news.append(sign.text)
    if before is not None:
        for event in _happenings(before, now):
            complaints[event.key] = Complaint(event.text, now.at, now.at + _EVENT_S)
            news.append(event.text)
    current = {key: c for key, c in complaints.items() if c.until is None or c.until > now.at}
    up = tuple(dict.fromkeys((*health.up, *(nic.name for nic in now.nics if nic.carrier))))
    return Health(now, current, {k: n for k, n in suspected.items() if n}, up), tuple(news)


def next_look_s(health: Health, usual_s: float) -> float:
    """Read more often while memory is short: it can run out within a second."""
    memory = health.last.memory if health.last is not None else None
    return usual_s / 5 if memory is not None and memory.share >= MEMORY_WORTH_TELLING else usual_s


# --- what lasts ----------------------------------------------------------------------------------------


def _signs(health: Health, before: NodeReading | None, now: NodeReading) -> Iterator[_Sign]:
    if now.memory is not None:
        yield _memory(now.memory)
    yield _Sign(
        "stall",
        now.stalled >= _STALLED,
        now.stalled <= _UNSTALLED,
        f"memory pressure: nothing ran for {now.stalled:.0f} % of the last 10 s because memory ran short",
        "memory pressure has ended",
    )
    for disk in now.disks:
        yield _disk(disk)
    for gpu in now.gpus:
        yield from _gpu(gpu)
    yield from _carriers(health, now)
    if before is not None and now.at > before.at:
        yield from _rates(before, now)


def _memory(memory: Memory) -> _Sign:
    text = f"memory is at {memory_in_words(memory)}"
    over = f"memory is down to {memory_in_words(memory)}"
    return _Sign("memory", memory.share >= MEMORY_HIGH, memory.share < MEMORY_FINE, text, over, False)


def memory_in_words(memory: Memory) -> str:
    sizes = f"{memory.used / GIB:.1f} of {memory.limit / GIB:.1f} GiB"
    if memory.limit < GIB:
        sizes = f"{memory.used / MIB:.0f} of {memory.limit / MIB:.0f} MiB"
    return f"{100 * memory.share:.0f} % of {memory.whose} ({sizes})"


def _disk(disk: Disk) -> _Sign:
    little = min(_DISK_SHARE * disk.total, _DISK_BYTES)
    free = f"{disk.free / GIB:.1f} GiB" if disk.free >= GIB else f"{disk.free / MIB:.0f} MiB"
    return _Sign(
        f"disk {disk.path}",
        disk.free < little,
        disk.free >= _DISK_ENOUGH * little,
        f"the disk of {disk.path} is nearly full: {free} left",
        f"the disk of {disk.path} has enough space again: {free} left",
        False,
    )


def _gpu(gpu: Gpu) -> Iterator[_Sign]:
    name = f"GPU {gpu.index}"
    lost = f"{name} does not answer: {gpu.lost}"
    yield _Sign(f"lost {name}", bool(gpu.lost), not gpu.lost, lost, f"{name} answers again")
    if not gpu.lost:
        why = " and ".join(gpu.slowed_by)
        slow = f"{name} runs slower because of {why} ({gpu.temperature} C)"
        yield _Sign(f"slow {name}", bool(why), not why, slow, f"{name} runs at full speed again")


def _carriers(health: Health, now: NodeReading) -> Iterator[_Sign]:
    """Check only interfaces that once had a carrier: others are not plugged in."""
    here = {nic.name: nic.carrier for nic in now.nics}
    for name in health.up:
        up = here.get(name, False)
        yield _Sign(
            f"link {name}", not up, up, f"network interface {name} is down", f"{name} is up again", False
        )


def _rates(before: NodeReading, now: NodeReading) -> Iterator[_Sign]:
    seconds = now.at - before.at
    swapping = (now.swapped - before.swapped) / seconds
    yield _Sign(
        "swap",
        swapping >= _SWAPPING,
        swapping <= _CALM,
        f"the machine swaps: {swapping / MIB:.0f} MiB a second",
        "the machine no longer swaps",
    )
    if now.throttling is not None and before.throttling is not None:
        yield _throttled(before.throttling, now.throttling)
    earlier = {nic.name: nic for nic in before.nics}
    for nic in now.nics:
        if nic.name in earlier:
            yield from _traffic(earlier[nic.name], nic, seconds)


def _throttled(before: Throttling, now: Throttling) -> _Sign:
    periods = now.periods - before.periods
    share = (now.throttled - before.throttled) / periods if periods > 0 else 0.0
    quota = f" of {now.cpus:.3g} CPUs" if now.cpus else ""
    return _Sign(
        "throttling",
        share >= _THROTTLED,
        share <= _FREE,
        f"the cgroup's CPU quota{quota} is used up in {100 * share:.0f} % of the scheduler periods",
        "the cgroup's CPU quota is sufficient again",
    )


def _traffic(before: Nic, now: Nic, seconds: float) -> Iterator[_Sign]:
    for what, was, is_, high, low in (
        ("errors", before.errors, now.errors, _NIC_ERRORS, _NIC_QUIET),
        ("dropped packets", before.drops, now.drops, _NIC_DROPS, _NIC_FEW),
    ):
        rate = (is_ - was) / seconds
        text = f"network interface {now.name}: {rate:.3g} {what} a second"
        over = f"network interface {now.name}: no more {what}"
        yield _Sign(f"{what} {now.name}", rate >= high, rate <= low, text, over)


# --- what happens --------------------------------------------------------------------------------------


def _happenings(before: NodeReading, now: NodeReading) -> Iterator[_Happened]:
    if before.memory is not None and now.memory is not None and before.memory.whose == now.memory.whose:
        killed = now.memory.oom_kills - before.memory.oom_kills
        if killed > 0:
            processes = "a process" if killed == 1 else f"{killed} processes"
            yield _Happened("oom", f"the kernel has killed {processes} here because memory ran out")
    earlier = {gpu.index: gpu for gpu in before.gpus if not gpu.lost}
    for gpu in now.gpus:
        for xid in gpu.xids:
            yield _Happened(f"xid {gpu.index}", f"GPU {gpu.index}: the driver reports Xid {xid}")
        was = earlier.get(gpu.index)
        if was is not None and not gpu.lost and gpu.ecc_uncorrected > was.ecc_uncorrected:
            count = gpu.ecc_uncorrected - was.ecc_uncorrected
            yield _Happened(f"ecc {gpu.index}", f"GPU {gpu.index}: {count} uncorrectable memory errors (ECC)")


# --- what was to be seen before a rank died ------------------------------------------------------------


def before_death(health: Health, now: float) -> str:
    """What the report of a dead rank mentions: all complaints, and memory that was nearly full. Empty: nothing."""
    last = health.last
    if last is None:
        return ""
    parts = [c.text for key, c in health.complaints.items() if key != "memory"]
    memory = last.memory
    if memory is not None and memory.share >= MEMORY_WORTH_TELLING and now - last.at <= _FRESH_S:
        parts.insert(0, f"memory was at {memory_in_words(memory)} {now - last.at:.0f} s before")
    return "; ".join(parts)
