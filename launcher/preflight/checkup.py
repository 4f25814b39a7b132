"""Evaluates the data of a machine: each value becomes a check, with a required value and advice.

Grades: `fail`: ranks would not run here, or would delay all others; the job excludes such a node. `warn`: ranks run,
but the user should know. `skipped`: the check was not possible, with the reason. If a healthy machine could fail a
check (a busy GPU, a slow disk, a small /dev/shm), the grade is only `warn`, because users disable checks that reject
healthy machines.
"""

from __future__ import annotations

from dataclasses import field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


class Grade(StrEnum):
    OK = "ok"
    SKIPPED = "skipped"
    WARN = "warn"
    FAIL = "fail"


_EXIT_CODES = {Grade.OK: 0, Grade.SKIPPED: 0, Grade.WARN: 1, Grade.FAIL: 2}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    grade: Grade
    found: str  # or why it was skipped
    floor: str = ""
    advice: str = ""  # what to do; empty if nothing


def exit_code(checks: Iterable[Check]) -> int:
    return max((_EXIT_CODES[check.grade] for check in checks), default=0)


def failures(checks: Iterable[Check]) -> str:
    """Return the failed checks in one line, for the service and the other nodes; "" for a healthy node."""
    return "; ".join(f"{check.name}: {check.found}" for check in checks if check.grade is Grade.FAIL)


def skipped(name: str, why: str) -> Check:
    return Check(name, Grade.SKIPPED, why)


def overdue(name: str, within_s: float) -> Check:
    """A check that has not finished, because a disk or a driver does not respond."""
    found = f"no answer within {within_s:g} s"
    return Check(name, Grade.WARN, found, advice="check the kernel's log for a disk or driver that hangs")


def _graded(
    name: str, found: str, floor: str, advice: str, *, warn: bool = False, fail: bool = False
) -> Check:
    grade = Grade.FAIL if fail else Grade.WARN if warn else Grade.OK
    return Check(name, grade, found, floor, advice if grade is not Grade.OK else "")


def of_bytes(count: float) -> str:
    for unit, size in (("GB", GB), ("MB", MB), ("KB", KB)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} bytes"


# --- memory and limits -------------------------------------------------------------------------------

_RANK_BYTES = 384 * MB  # torch alone, and a little
_HOPELESS_BYTES = 128 * MB
_SHM_FLOOR = 512 * MB
_FILES_FLOOR, _FILES_HOPELESS = 4096, 128
_LOCKED_FLOOR = GB


@dataclass(frozen=True, slots=True)
class Memory:
    total: int
    available: int
    limit: int | None = None  # of the cgroup
    used: int = 0  # of that limit


def judge_memory(memory: Memory, ranks: int) -> Check:
    left, where = memory.available, f"of {of_bytes(memory.total)}"
    if memory.limit is not None and memory.limit - memory.used < left:
        left, where = (
            max(0, memory.limit - memory.used),
            f"of the cgroup's limit of {of_bytes(memory.limit)}",
        )
    floor = ranks * _RANK_BYTES
    advice = "stop other programs on this machine, raise the limit, or run fewer ranks (--nproc-per-node)"
    return _graded(
        "memory",
        f"{of_bytes(left)} free {where}",
        f"at least {of_bytes(floor)} for {ranks} rank{'s' if ranks > 1 else ''}",
        advice,
        warn=left < floor,
        fail=left < _HOPELESS_BYTES,
    )


@dataclass(frozen=True, slots=True)
class SharedMemory:
    total: int
    free: int


def judge_shared_memory(shm: SharedMemory | None) -> Check:
    if shm is None:
        return Check(
            "/dev/shm",
            Grade.WARN,
            "does not exist",
            f"at least {of_bytes(_SHM_FLOOR)}",
            "mount a tmpfs at /dev/shm: DataLoader workers and NCCL share memory there",
        )
    small, full = shm.total < _SHM_FLOOR, shm.free < _SHM_FLOOR
    default = " (a container's default)" if shm.total == 64 * MB else ""
    return _graded(
        "/dev/shm",
        f"{of_bytes(shm.free)} free of {of_bytes(shm.total)}{default}",
        f"at least {of_bytes(_SHM_FLOOR)}",
        "make it larger: docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of medium Memory"
        if small
        else "remove the files of earlier jobs there",
        warn=small or full,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    open_files: int  # the hard limit; -1: none
    locked_bytes: int  # -1: no limit
    pins_memory: bool = False  # the machine has a device that needs locked memory


def judge_limits(limits: Limits) -> tuple[Check, ...]:
    files = limits.open_files
    open_files = _graded(
        "open files",
        "unlimited" if files < 0 else f"limit: {files}",
        f"at least {_FILES_FLOOR}",
        "raise the limit: ulimit -Hn 65536, LimitNOFILE= of the unit, or docker run --ulimit nofile=65536",
        warn=0 <= files < _FILES_FLOOR,
        fail=0 <= files < _FILES_HOPELESS,
    )
    if not limits.pins_memory:
        return open_files, skipped(
            "locked memory", "not checked: only needed with a GPU or an InfiniBand device"
        )
    locked = limits.locked_bytes
    return open_files, _graded(
        "locked memory",
        "unlimited" if locked < 0 else f"limit: {of_bytes(locked)}",
        "unlimited",
        "raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1",
        warn=0 <= locked < _LOCKED_FLOOR,
    )


# --- disks -------------------------------------------------------------------------------------------

_DISK_FLOOR, _DISK_HOPELESS = GB, 32 * MB
_WRITE_FLOOR = 20 * MB  # per second ...
_STALLED = MB  # ... of a long write; a short write may have waited for other writes


@dataclass(frozen=True, slots=True)
class Storage:
    what: str  # "logs", "checkpoints"
    path: str
    total: int = 0
    free: int = 0
    write_bps: float | None = None  # bytes per second, with fsync
    problem: str = ""
    glimpse: bool = False  # measured with a short write only


def judge_storage(storage: Storage) -> Check:
    name = f"{storage.what} in {storage.path}"
    if storage.problem:
        return Check(
            name, Grade.FAIL, storage.problem, advice="use another directory, or make this one writable"
        )
    floor = _STALLED if storage.glimpse else _WRITE_FLOOR
    slow = storage.write_bps is not None and storage.write_bps < floor
    scarce = storage.total > 0 and storage.free < _DISK_FLOOR
    speed = "" if storage.write_bps is None else f", writes {of_bytes(storage.write_bps)}/s"
    advice = "remove files there, or use another directory" if scarce else "use a directory on a faster disk"
    return _graded(
        name,
        (
            f"{of_bytes(storage.free)} free of {of_bytes(storage.total)}"
            if storage.total
            else "free space unknown"
        )
        + speed,
        f"at least {of_bytes(_DISK_FLOOR)}, {of_bytes(floor)}/s",
        advice,
        warn=scarce or slow,
        fail=scarce and storage.free < _DISK_HOPELESS,
    )


# --- name, network, clock ----------------------------------------------------------------------------

_CLOCK_FLOOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str = ""
    mtu: int = 0
    up: bool = True
    speed: int = 0  # Mbit/s as its driver reports; 0: not reported
    exists: bool = True


@dataclass(frozen=True, slots=True)
class Network:
    host: str
    addresses: tuple[str, ...] = ()  # to which the host name resolves
    interface: Interface | None = None
    asked: bool = False  # set by --interface
    alone: bool = True  # the job has only this machine


def judge_network(network: Network) -> tuple[Check, ...]:
    return _judge_name(network), _judge_interface(network)


def _judge_name(network: Network) -> Check:
    host, addresses = network.host, network.addresses
    advice = f"add {host} to /etc/hosts or the name service, or give --interface"
    if not addresses:
        return Check("host name", Grade.WARN, f"{host} does not resolve", "an address", advice)
    inward = all(address.startswith("127.") or address == "::1" for address in addresses)
    lost = inward and not network.alone and not network.asked
    return _graded(
        "host name",
        f"{host} is {', '.join(addresses[:4])}",
        "an address that other nodes can reach",
        advice,
        warn=lost,
    )


def _judge_interface(network: Network) -> Check:
    there = network.interface
    if there is None:
        return skipped("interface", "this machine has no default route")
    if not there.exists:
        advice = "list the interfaces with ip link, and give one of them as --interface"
        return Check("interface", Grade.FAIL, f"{there.name} does not exist", "up", advice)
    speed = f", {there.speed} Mbit/s" if there.speed else ""
    return _graded(
        "interface",
        f"{there.name} is {'up' if there.up else 'down'}, {there.address or 'no address'}, MTU {there.mtu}{speed}",
        "up",
        f"ip link set {there.name} up; check cable and switch",
        warn=not there.up or not there.address,
        fail=network.asked and not there.up,
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock offset (service minus this node), and the error bound of the measurement."""

    offset_s: float
    within_s: float


def judge_clock(clock: Clock) -> Check:
    """Subtract the measurement error (half of the round trip) from the offset."""
    certain = max(0.0, abs(clock.offset_s) - clock.within_s)
    way = "behind" if clock.offset_s > 0 else "ahead of"
    exact = (
        f"the clock is {abs(clock.offset_s):.3f} s (±{clock.within_s:.3f} s) {way} the clock of the service"
    )
    return _graded(
        "clock",
        exact,
        f"at most {_CLOCK_FLOOR_S:g} s",
        "run chrony or ntpd: otherwise log times cannot be compared, and the service may reject access tokens",
        warn=certain > _CLOCK_FLOOR_S,
    )


# --- versions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Versions:
    python: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    driver: str = ""

    def __str__(self) -> str:
        """The format of the versions in NodeFacts."""
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__ if getattr(self, name))


def judge_versions(versions: Versions) -> Check:
    if not versions.torch:
        found = f"torch is not installed for the ranks' Python {versions.python}".rstrip()
        # Not every script needs torch; one that does fails with its own message.
        return Check(
            "versions", Grade.SKIPPED, f"{found}; install torch, or set PYTHON_EXEC to another Python"
        )
    return Check("versions", Grade.OK, ", ".join(part.replace("=", " ") for part in str(versions).split(" ")))


def judge_core(state: str) -> Check:
    """`state` of compiled_core. Without the core everything works, and CPU tensors travel over Gloo."""
    advice = "install a wheel of ddp-launch, or install it again where there is a C compiler"
    return _graded("core", state, "compiled", advice, warn=state != "compiled")


# --- a node as a whole ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one node."""

    node: str
    level: str
    checks: tuple[Check, ...] = ()
    versions: Versions = field(default_factory=Versions)
    took_s: float = 0.0
    block: str = ""  # the place of the node in the network
    hardware: str = ""  # its GPUs and their links, in words

    @property
    def healthy(self) -> bool:
        return not failures(self.checks)

    def plus(self, more: Sequence[Check]) -> Report:
        return replace(self, checks=(*self.checks, *more))
