"""The health of this node: compares two readings and reports changes. Without I/O.

A `NodeReading` holds values that can be read within a millisecond; counters are stored as totals, not as rates.
`evaluate` compares it with the previous reading and reports the current problems. Each problem has two thresholds, one
to begin and a lower one to end, so that a value near a threshold is not reported again and again. A value that may be a
spike must be present in two consecutive readings. The begin and the end of a problem are each reported once. An event
(a process ended by the out-of-memory killer, an Xid) stays in the list of problems for 10 min; its end is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from launcher.sources import Opinion, Severity
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.machine.gpu_state import Gpu

GIB = 1 << 30
MIB = 1 << 20

MEMORY_HIGH, MEMORY_FINE = 0.95, 0.90
MEMORY_TO_REPORT = 0.85  # in the report of a rank that ended
_STALLED, _UNSTALLED = 20.0, 5.0  # % of time in which all processes waited for memory
_SWAPPING, _CALM = 10.0 * MIB, 1.0 * MIB  # a second
_THROTTLED, _FREE = 0.25, 0.05  # of the scheduler's periods
_NIC_ERRORS, _NIC_QUIET = 1.0, 0.1  # a second
_NIC_DROPS, _NIC_FEW = 100.0, 10.0
_DISK_SHARE, _DISK_BYTES = 0.02, 2 * GIB  # less than both is too little ...
_DISK_ENOUGH = 1.5  # ... and this much more is enough
_EVENT_S = 600.0
_LESS_MEMORY = "use fewer DataLoader workers or smaller batches, or raise the memory limit"
_TEST_GPU = "see dmesg, and run `ddp-launch doctor` on this node"
_READINGS = 2  # in a row, for a value that may be a spike
_FRESH_S = 30.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """`used` does not include memory that the kernel can reclaim immediately (page cache)."""

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
    used_s: float = 0.0  # CPU seconds of the cgroup; 0: unknown


@dataclass(frozen=True, slots=True)
class Nic:
    name: str
    errors: int
    drops: int
    carrier: bool
    received: int = 0  # bytes
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class NodeReading:
    at: float
    memory: MemoryUse | None = None  # of the cgroup, or machine, with the least free memory
    stalled: float = 0.0  # %
    swapped: int = 0  # bytes in and out, counted since the machine started
    throttling: Throttling | None = None
    cpu: tuple[int, int] = (0, 0)  # of all CPUs of the machine: busy, and the whole time, in any unit
    disk: tuple[int, int] = (0, 0)  # bytes that its disks have read, and written
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    disks: tuple[Disk, ...] = ()
    outside: tuple[Opinion, ...] = ()  # what health sources say


@dataclass(frozen=True, slots=True)
class HealthProblem:
    text: str
    since: float
    until: float | None = None  # for an event: when it is removed from the list
    unfit: bool = False  # the node should not be part of the next world


@dataclass(frozen=True, slots=True)
class HealthState:
    last: NodeReading | None = None
    complaints: Mapping[str, HealthProblem] = field(default_factory=dict)
    suspected: Mapping[str, int] = field(default_factory=dict)  # number of readings in a row
    up: tuple[str, ...] = ()  # interfaces that have had a carrier
    use: Mapping[str, float] = field(default_factory=dict)  # since the reading before: see `use_between`
    memory: tuple[MemoryUse, float] | None = None  # the last high use, and when: a rank that ends frees it

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(complaint.text for complaint in self.complaints.values())

    @property
    def unfit(self) -> str:
        """Why the node should not be part of the next world; "" if it may."""
        return "; ".join(complaint.text for complaint in self.complaints.values() if complaint.unfit)


@dataclass(frozen=True, slots=True)
class _Symptom:
    """One problem as one reading shows it."""

    key: str
    bad: bool  # the problem begins
    fine: bool  # the problem ends
    text: str
    over: str  # the text for its end
    may_be_a_spike: bool = True
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class _Incident:
    key: str
    text: str
    unfit: bool = False


def evaluate(health: HealthState, now: NodeReading) -> tuple[HealthState, tuple[str, ...]]:
    """Return the health now, and one line for each change."""
    before = health.last
    complaints, suspected = dict(health.complaints), dict(health.suspected)
    news: list[str] = []
    for symptom in _symptoms(health, before, now):
        if symptom.key in complaints:
            if symptom.fine:
                del complaints[symptom.key]
                news.append(symptom.over)
            continue
        suspected[symptom.key] = suspected.get(symptom.key, 0) + 1 if symptom.bad else 0
        if symptom.bad and suspected[symptom.key] >= (_READINGS if symptom.may_be_a_spike else 1):
            complaints[symptom.key] = HealthProblem(symptom.text, now.at, unfit=symptom.unfit)
            news.append(symptom.text)
    if before is not None:
        for event in _incidents(before, now):
            complaints[event.key] = HealthProblem(event.text, now.at, now.at + _EVENT_S, event.unfit)
            news.append(event.text)
    current = {key: c for key, c in complaints.items() if c.until is None or c.until > now.at}
    up = tuple(dict.fromkeys((*health.up, *(nic.name for nic in now.nics if nic.carrier))))
    use = use_between(before, now) if before is not None else {}
    memory = (now.memory, now.at) if now.memory and now.memory.share >= MEMORY_TO_REPORT else health.memory
    return HealthState(now, current, {k: n for k, n in suspected.items() if n}, up, use, memory), tuple(news)


def next_sample_s(health: HealthState, usual_s: float) -> float:
    """Read more often if little memory is free: it can run out within a second."""
    memory = health.last.memory if health.last is not None else None
    return usual_s / 5 if memory is not None and memory.share >= MEMORY_TO_REPORT else usual_s


# --- problems that last ----------------------------------------------------------------------------------------


def _symptoms(health: HealthState, before: NodeReading | None, now: NodeReading) -> Iterator[_Symptom]:
    if now.memory is not None:
        yield _memory(now.memory)
    yield _Symptom(
        "stall",
        now.stalled >= _STALLED,
        now.stalled <= _UNSTALLED,
        f"memory pressure: all processes waited for memory in {now.stalled:.0f} % of the last 10 s; use fewer "
        "workers or a smaller batch",
        "memory pressure has ended",
    )
    for disk in now.disks:
        yield _disk(disk)
    for gpu in now.gpus:
        yield from _gpu(gpu)
    yield from _carriers(health, now)
    yield from _outside(health, now)
    if before is not None and now.at > before.at:
        yield from _rates(before, now)


def _memory(memory: MemoryUse) -> _Symptom:
    text = f"memory use is high: {memory_in_words(memory)}; use fewer workers or a smaller batch"
    over = f"memory use has decreased to {memory_in_words(memory)}"
    return _Symptom("memory", memory.share >= MEMORY_HIGH, memory.share < MEMORY_FINE, text, over, False)


def memory_in_words(memory: MemoryUse) -> str:
    sizes = f"{memory.used / GIB:.1f} of {memory.limit / GIB:.1f} GiB"
    if memory.limit < GIB:
        sizes = f"{memory.used / MIB:.0f} of {memory.limit / MIB:.0f} MiB"
    return f"{100 * memory.share:.0f} % of {memory.whose} ({sizes})"


def _disk(disk: Disk) -> _Symptom:
    little = min(_DISK_SHARE * disk.total, _DISK_BYTES)
    free = f"{disk.free / GIB:.1f} GiB" if disk.free >= GIB else f"{disk.free / MIB:.0f} MiB"
    return _Symptom(
        f"disk {disk.path}",
        disk.free < little,
        disk.free >= _DISK_ENOUGH * little,
        f"the disk of {disk.path} is nearly full: {free} free; remove files, or use another --log-dir",
        f"the disk of {disk.path} has enough space again: {free} free",
        False,
    )


def _gpu(gpu: Gpu) -> Iterator[_Symptom]:
    name = f"GPU {gpu.index}"
    lost = f"{name} does not respond: {gpu.lost}; look for Xid errors in dmesg"
    yield _Symptom(f"lost {name}", bool(gpu.lost), not gpu.lost, lost, f"{name} responds again", unfit=True)
    if not gpu.lost:
        why = " and ".join(gpu.slowed_by)
        degrees = "" if gpu.temperature is None else f" ({gpu.temperature} C)"
        slow = f"{name} runs slower because of {why}{degrees}; check its cooling and power supply"
        yield _Symptom(f"slow {name}", bool(why), not why, slow, f"{name} runs at full speed again")
        worn = f"{name} has no spare memory rows left; replace the GPU"
        spent = bool(gpu.worn_out)
        yield _Symptom(
            f"worn {name}", spent, not spent, worn, f"{name} has spare memory rows again", False, unfit=True
        )
        rows = f"{name} has faulty memory rows that will be retired at its next reset; reset it after the job"
        repaired = f"{name} no longer waits for a reset"
        waits = bool(gpu.reset_needed)
        yield _Symptom(f"rows {name}", waits, not waits, rows, repaired, False)


def _carriers(health: HealthState, now: NodeReading) -> Iterator[_Symptom]:
    """Check only interfaces that once had a carrier; others are probably not connected."""
    here = {nic.name: nic.carrier for nic in now.nics}
    for name in health.up:
        up = here.get(name, False)
        yield _Symptom(
            f"link {name}", not up, up, f"network interface {name} is down", f"{name} is up again", False
        )


_OUTSIDE = "health source "


def _outside(health: HealthState, now: NodeReading) -> Iterator[_Symptom]:
    """Findings come and go: one that is missing in the answer has ended. If a source fails, its findings stay."""
    seen: dict[str, tuple[str, bool]] = {}
    for opinion in now.outside:
        place = f"{_OUTSIDE}{opinion.place}"
        fails = f"{place} does not answer: {opinion.problem}; the job continues without it"
        missing = (
            bool(opinion.problem) and opinion.has_answered
        )  # pre-flight has reported one that never answered
        yield _Symptom(f"{place} fails", missing, not opinion.problem, fails, f"{place} answers again", False)
        for finding in opinion.findings:
            if finding.severity >= Severity.WARNING:
                unfit = finding.severity is Severity.UNFIT
                says = "this node is unfit: " if unfit else ""
                seen[f"{place} {finding.key}"] = f"{place}: {says}{finding}", unfit
    for key, (text, unfit) in seen.items():
        yield _Symptom(key, True, False, text, "", False, unfit)
    for key, problem in health.complaints.items():
        if key.startswith(_OUTSIDE) and not key.endswith(" fails") and key not in seen:
            yield _Symptom(key, False, True, "", f"no longer reported: {problem.text}", False)


def _rates(before: NodeReading, now: NodeReading) -> Iterator[_Symptom]:
    seconds = now.at - before.at
    swapping = (now.swapped - before.swapped) / seconds
    yield _Symptom(
        "swap",
        swapping >= _SWAPPING,
        swapping <= _CALM,
        f"the machine swaps {swapping / MIB:.0f} MiB per second; use fewer ranks or a smaller batch",
        "the machine no longer swaps",
    )
    if now.throttling is not None and before.throttling is not None:
        yield _throttled(before.throttling, now.throttling)
    earlier = {nic.name: nic for nic in before.nics}
    for nic in now.nics:
        if nic.name in earlier:
            yield from _traffic(earlier[nic.name], nic, seconds)


def _throttled(before: Throttling, now: Throttling) -> _Symptom:
    periods = now.periods - before.periods
    share = (now.throttled - before.throttled) / periods if periods > 0 else 0.0
    quota = f" of {now.cpus:.3g} CPUs" if now.cpus else ""
    return _Symptom(
        "throttling",
        share >= _THROTTLED,
        share <= _FREE,
        f"the cgroup's CPU quota{quota} is used up in {100 * share:.0f} % of its periods; raise the CPU "
        "limit of the container, or start fewer ranks",
        "the cgroup's CPU quota is sufficient again",
    )


def _traffic(before: Nic, now: Nic, seconds: float) -> Iterator[_Symptom]:
    for what, was, is_, high, low in (
        ("errors", before.errors, now.errors, _NIC_ERRORS, _NIC_QUIET),
        ("dropped packets", before.drops, now.drops, _NIC_DROPS, _NIC_FEW),
    ):
        rate = (is_ - was) / seconds
        text = f"network interface {now.name}: {rate:.3g} {what} per second; check the cable and the switch"
        over = f"network interface {now.name}: no more {what}"
        yield _Symptom(f"{what} {now.name}", rate >= high, rate <= low, text, over)


# --- events --------------------------------------------------------------------------------------


def _incidents(before: NodeReading, now: NodeReading) -> Iterator[_Incident]:
    if before.memory is not None and now.memory is not None and before.memory.whose == now.memory.whose:
        killed = now.memory.oom_kills - before.memory.oom_kills
        if killed > 0:
            processes = "a process" if killed == 1 else f"{killed} processes"
            yield _Incident(
                "oom", f"the kernel's out-of-memory killer ended {processes} on this node; {_LESS_MEMORY}"
            )
    earlier = {gpu.index: gpu for gpu in before.gpus if not gpu.lost}
    for gpu in now.gpus:
        for xid in gpu.xids:
            text = f"GPU {gpu.index}: the driver reports {xid}; {xid.advice}"
            yield _Incident(f"xid {gpu.index} {xid.code}", text, xid.meaning.is_unfit)
        was = earlier.get(gpu.index)
        count = (gpu.ecc_uncorrected or 0) - (was.ecc_uncorrected or 0 if was is not None else 0)
        if was is not None and not gpu.lost and count > 0:
            yield _Incident(
                f"ecc {gpu.index}", f"GPU {gpu.index}: {count} uncorrectable memory errors (ECC); {_TEST_GPU}"
            )


# --- use, for charts ------------------------------------------------------------------------------


def use_between(before: NodeReading, now: NodeReading) -> dict[str, float]:
    """How much of the node is used: percent, degrees and bytes per second, by a name that says which.

    CPU time is that of the cgroup if it has a quota, else of the machine. Of several GPUs, the mean and the least use
    and the highest temperature are given.
    """
    seconds = now.at - before.at
    if seconds <= 0:
        return {}
    found = {"cpu_percent": _cpu_percent(before, now, seconds)}
    if now.memory is not None:
        found["memory_percent"] = 100 * now.memory.share
    gpus = [gpu for gpu in now.gpus if not gpu.lost]
    if used := [gpu.utilization for gpu in gpus if gpu.utilization is not None]:
        found |= {"gpu_percent": sum(used) / len(used), "gpu_least_percent": min(used)}
    if shares := [gpu.memory_used / gpu.memory_total for gpu in gpus if gpu.memory_total]:
        found["gpu_memory_percent"] = 100 * max(shares)
    if degrees := [gpu.temperature for gpu in gpus if gpu.temperature is not None]:
        found["gpu_celsius"] = max(degrees)
    earlier = {nic.name: nic for nic in before.nics}
    pairs = [(earlier[nic.name], nic) for nic in now.nics if nic.name in earlier]
    if pairs:
        found["received_bytes"] = sum(nic.received - was.received for was, nic in pairs) / seconds
        found["sent_bytes"] = sum(nic.sent - was.sent for was, nic in pairs) / seconds
    if any(now.disk):
        found["read_bytes"] = (now.disk[0] - before.disk[0]) / seconds
        found["written_bytes"] = (now.disk[1] - before.disk[1]) / seconds
    return {name: max(0.0, value) for name, value in found.items()}


def _cpu_percent(before: NodeReading, now: NodeReading, seconds: float) -> float:
    was, quota = before.throttling, now.throttling
    if quota is not None and was is not None and quota.cpus and quota.used_s:
        return 100 * (quota.used_s - was.used_s) / seconds / quota.cpus
    whole = now.cpu[1] - before.cpu[1]
    return 100 * (now.cpu[0] - before.cpu[0]) / whole if whole > 0 else 0.0


# --- the report of a rank that ended ------------------------------------------------------------


def before_end(health: HealthState, now: float) -> str:
    """The text for the report of a failed rank: current problems of the node, and high memory use. "" if none."""
    parts = [c.text for key, c in health.complaints.items() if key != "memory"]
    memory, at = health.memory or (None, 0.0)
    if memory is not None and now - at <= _FRESH_S:
        parts.insert(0, f"memory use was {memory_in_words(memory)} {now - at:.0f} s before the rank ended")
    return "; ".join(parts)
