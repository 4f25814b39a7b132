"""Evaluates the data of a machine: each value becomes a check, with a required value and advice.

Grades: `fail`: ranks would not run here, or would delay all others; the job excludes such a node. `warn`: ranks run,
but the user should know. `skipped`: the check was not possible, with the reason. If a healthy machine could fail a
check (a busy GPU, a slow disk, a small /dev/shm), the grade is only `warn`, because users disable checks that reject
healthy machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from textwrap import wrap
from typing import Any

from launcher.machine.gpu_state import Gpu, Layout, PcieLink, Process, in_words
from launcher.machine.xids import Xid, short_bus
from launcher.sources import HealthFinding, Severity
from rendezvous.values.late_dataclass import dataclass

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
class ProcessLimits:
    open_files: int  # the hard limit; -1: none
    locked_bytes: int  # -1: no limit
    pins_memory: bool = False  # the machine has a device that needs locked memory


def judge_limits(limits: ProcessLimits) -> tuple[Check, ...]:
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


def judge_versions(versions: Versions, problem: str = "") -> Check:
    """`problem`: what is wrong with one of them, if that is known."""
    if not versions.torch:
        found = f"torch is not installed for the ranks' Python {versions.python}".rstrip()
        # Not every script needs torch; one that does fails with its own message.
        return Check(
            "versions", Grade.SKIPPED, f"{found}; install torch, or set PYTHON_EXEC to another Python"
        )
    if problem:
        return Check("versions", Grade.FAIL, problem)
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
    hardware: str = ""  # its GPUs and their links, as text

    @property
    def healthy(self) -> bool:
        return not failures(self.checks)

    def plus(self, more: Sequence[Check]) -> Report:
        return replace(self, checks=(*self.checks, *more))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What nodes have found when they compared themselves: the door `ddp_launch.node_comparison`.

    `too_late`: the comparison has already finished; this node cannot take part.
    """

    checks: tuple[Check, ...]
    too_late: bool = False


# --- evaluates the state of the GPUs, from the driver and the kernel log ----------------------------
#
# A GPU that needs a reset or a replacement fails. Errors of the running program (Xid 13, 31, 43, 45) say nothing
# about the device. A busy GPU is a warning: the job before may be just ending. Only GPUs that the job may use are
# judged: those of CUDA_VISIBLE_DEVICES, if it is set.


@dataclass(frozen=True, slots=True)
class Gpus:
    gpus: tuple[Gpu, ...] = ()  # those that the job may use
    present: int = 0  # GPUs that the driver reports
    on_bus: int = 0  # NVIDIA GPUs on the PCIe bus; 0: unknown
    xids: tuple[Xid, ...] = ()
    uptime_s: float = 0.0  # of the machine, when `xids` were read
    log_readable: bool = False
    problem: str = ""  # why the driver does not respond
    mismatch: bool = False  # the kernel module of the driver and its library are of two releases
    driver: str = ""


_IDLE_FRACTION = 0.1
_IDLE_BYTES = GB
_RECENT_S = 3600.0
_IDLE_FLOOR = f"at most {_IDLE_FRACTION:.0%} of the memory in use"
_NAMED_PROCESSES = 4
_MPS = "nvidia-cuda-mps"
_FULL_SPEED = 0  # the performance state in which the PCIe link does not save power


def judge_gpus(found: Gpus, *, wanted: bool) -> tuple[Check, ...]:
    """`wanted`: the user requested GPUs (--nproc-per-node gpu)."""
    if not found.gpus:
        return (_none(found, wanted),)
    sound = [gpu for gpu in found.gpus if not gpu.lost]
    return (
        _all_respond(found),
        *((_idle(sound), _memory_errors(sound)) if sound else ()),
        _xids(found),
        *_clocks(sound),
        *_pcie(sound),
        *_links(sound),
        *_fabric(sound),
        *_persistence(sound),
    )


def _none(found: Gpus, wanted: bool) -> Check:
    if found.mismatch:
        advice = (
            "the driver was upgraded while it was loaded: reboot the machine, or reload its kernel modules"
        )
        return Check("GPUs", Grade.FAIL, found.problem, advice=f"{advice}; then restart containers")
    if found.problem and (found.on_bus or wanted):
        advice = "run nvidia-smi to see more; reload the driver or reboot the machine"
        return Check("GPUs", Grade.FAIL, found.problem, advice=advice)
    if found.present:
        return skipped("GPUs", f"CUDA_VISIBLE_DEVICES selects none of the {found.present} GPUs")
    if found.on_bus:
        advice = "install the driver, or pass the devices to this container (--gpus all)"
        return Check(
            "GPUs", Grade.WARN, f"{found.on_bus} on the bus, but the driver is not installed", advice=advice
        )
    return skipped("GPUs", "this machine has no NVIDIA GPU")


def _all_respond(found: Gpus) -> Check:
    lost = [gpu for gpu in found.gpus if gpu.lost]
    advice = "look for Xid 79 in the kernel log; reboot the machine"
    if lost:
        what = "; ".join(f"GPU {gpu.index} does not respond: {gpu.lost}" for gpu in lost)
        return Check("GPUs", Grade.FAIL, what, "all respond", advice)
    if found.on_bus > found.present:
        what = f"{found.on_bus} GPUs on the PCIe bus, but the driver reports only {found.present}"
        advice = f"a container that got some of the GPUs is in order; otherwise {advice}"
        return Check("GPUs", Grade.WARN, what, advice=advice)  # a container sees the bus of the whole machine
    models = ", ".join(
        f"{number} × {name}" for name, number in Counter(gpu.name for gpu in found.gpus).items()
    )
    return Check("GPUs", Grade.OK, models + (f", driver {found.driver}" if found.driver else ""))


def _named(gpus: Iterable[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _idle(gpus: Sequence[Gpu]) -> Check:
    busy = [gpu for gpu in gpus if gpu.memory_used > max(_IDLE_BYTES, gpu.memory_total * _IDLE_FRACTION)]
    used = [gpu for gpu in gpus if _others(gpu) and gpu not in busy]
    if busy:
        found = "; ".join(f"GPU {gpu.index}: {_memory_text(gpu)}" for gpu in busy)
        advice = "end these programs, or wait until the job before has ended"
        if not any(gpu.processes for gpu in busy):
            advice = "find the programs with nvidia-smi (they may run in another container), and end them"
        return Check("GPUs idle", Grade.WARN, found, _IDLE_FLOOR, advice)
    if used:
        found = "; ".join(f"GPU {gpu.index} is also used by {_users(_others(gpu))}" for gpu in used)
        return Check("GPUs idle", Grade.WARN, found, "no other program", "end these programs")
    return Check("GPUs idle", Grade.OK, "the GPU memory is free", _IDLE_FLOOR)


def _others(gpu: Gpu) -> tuple[Process, ...]:
    """Without the server of MPS, through which the ranks themselves may use the GPU."""
    return tuple(each for each in gpu.processes if not each.name.startswith(_MPS))


def _memory_text(gpu: Gpu) -> str:
    by = f" by {_users(gpu.processes)}" if gpu.processes else ""
    return f"{of_bytes(gpu.memory_used)} of {of_bytes(gpu.memory_total)} used{by}"


def _users(processes: Sequence[Process]) -> str:
    most = sorted(processes, key=lambda each: (-each.memory, each.pid))
    shown = ", ".join(
        f"{each}" + (f", {of_bytes(each.memory)}" if each.memory else "") for each in most[:_NAMED_PROCESSES]
    )
    more = len(most) - _NAMED_PROCESSES
    return shown + (f" and {more} more" if more > 0 else "")


def _memory_errors(gpus: Sequence[Gpu]) -> Check:
    if all(gpu.ecc_uncorrected is None and gpu.reset_needed is None for gpu in gpus):
        return skipped("GPU memory errors", "not checked: these GPUs have no ECC counters")
    worn = [gpu for gpu in gpus if gpu.worn_out]
    reset = [gpu for gpu in gpus if gpu.reset_needed or gpu.ecc_uncorrected]
    if worn:
        found = f"GPU {_named(worn)}: no spare memory rows are left"
        return Check("GPU memory errors", Grade.FAIL, found, "none", "replace the GPU")
    if reset:
        told = ", ".join(f"GPU {gpu.index}: {_what_is_wrong(gpu)}" for gpu in reset)
        advice = (
            "reset the GPU (nvidia-smi --gpu-reset, after its processes have ended), or reboot the machine"
        )
        return Check("GPU memory errors", Grade.FAIL, told, "none", advice)
    repaired = ", ".join(f"GPU {gpu.index} {words}" for gpu in gpus if (words := _repaired(gpu)))
    found = f"none now; repaired earlier: {repaired}" if repaired else "none"
    return Check("GPU memory errors", Grade.OK, found, "none")


def _what_is_wrong(gpu: Gpu) -> str:
    if gpu.ecc_uncorrected:
        return f"{gpu.ecc_uncorrected} uncorrectable since the last reset"
    return "faulty memory rows will be retired at the next GPU reset"


def _repaired(gpu: Gpu) -> str:
    parts = (("remapped rows", gpu.remapped_rows), ("retired pages", gpu.retired_pages))
    return " and ".join(f"{number} {what}" for what, number in parts if number)


def _xids(found: Gpus) -> Check:
    if not found.log_readable:
        return skipped("Xid errors", "not checked: the kernel log is not readable (run doctor as root)")
    ours = {short_bus(gpu.bus) for gpu in found.gpus if gpu.bus}
    seen = [xid for xid in found.xids if not ours or xid.bus in ours]
    of_device = [xid for xid in seen if not xid.is_of_program]
    of_programs = [xid.code for xid in seen if xid.is_of_program]
    if not of_device:
        ended = f"; {len(of_programs)} caused by programs ({_codes(of_programs)})" if of_programs else ""
        return Check("Xid errors", Grade.OK, f"no Xid error caused by a GPU{ended}", "none")
    worst = max(of_device, key=lambda xid: (_is_fatal(xid, found.uptime_s), xid.at_s))
    ago_s = max(0.0, found.uptime_s - worst.at_s)
    told = f"{worst} ({_place(worst, found.gpus)}, {ago_s / 60:.0f} min ago)"
    others = [xid.code for xid in of_device if xid is not worst]
    if others:
        told += f"; and {len(others)} more ({_codes(others)})"
    grade = Grade.FAIL if _is_fatal(worst, found.uptime_s) else Grade.WARN
    return Check("Xid errors", grade, told, "none", worst.advice)


def _codes(codes: Iterable[int]) -> str:
    return ", ".join(f"Xid {code}" for code in sorted(set(codes)))


def _place(xid: Xid, gpus: Iterable[Gpu]) -> str:
    index = next((gpu.index for gpu in gpus if gpu.bus and short_bus(gpu.bus) == xid.bus), None)
    return xid.bus if index is None else f"GPU {index} at {xid.bus}"


def _is_fatal(xid: Xid, uptime_s: float) -> bool:
    return xid.meaning.is_unfit and uptime_s - xid.at_s < _RECENT_S


def _clocks(gpus: Sequence[Gpu]) -> Iterator[Check]:
    slow = [gpu for gpu in gpus if gpu.slowed_by]
    if slow:
        found = "; ".join(_slowed(gpu) for gpu in slow)
        advice = "check cooling, power supply and power cables (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        yield Check("GPU clocks", Grade.WARN, found, "not reduced", advice)
    elif gpus:
        hottest = max((gpu.temperature or 0 for gpu in gpus), default=0)
        yield Check("GPU clocks", Grade.OK, f"not reduced; at most {hottest} C", "not reduced")


def _slowed(gpu: Gpu) -> str:
    degrees = "" if gpu.temperature is None else f" ({gpu.temperature} C)"
    return f"GPU {gpu.index} runs slower because of {' and '.join(gpu.slowed_by)}{degrees}"


def _pcie(gpus: Sequence[Gpu]) -> Iterator[Check]:
    linked = [(gpu, gpu.pcie) for gpu in gpus if gpu.pcie is not None]
    reduced = [f"GPU {gpu.index} has {what}" for gpu, link in linked if (what := _reduced(gpu, link))]
    if reduced:
        advice = "reseat the GPU or its riser; check the slot's settings in the firmware"
        yield Check("PCIe", Grade.WARN, "; ".join(reduced), "full width and speed", advice)
    elif linked:
        kinds = Counter(f"x{link.width}, generation {link.generation}" for _, link in linked)
        yield Check("PCIe", Grade.OK, ", ".join(kinds), "full width and speed")


def _reduced(gpu: Gpu, link: PcieLink) -> str:
    """An idle GPU may lower the speed of its link, but not the width."""
    if link.width < link.most_width:
        return f"{link.width} of {link.most_width} PCIe lanes"
    if gpu.performance_state == _FULL_SPEED and link.generation < link.most_generation:
        return f"PCIe generation {link.generation} instead of {link.most_generation}"
    return ""


def _links(gpus: Sequence[Gpu]) -> Iterator[Check]:
    linked = [gpu for gpu in gpus if gpu.links]
    if not linked:
        return
    most = max(gpu.links_active for gpu in linked)
    down = [gpu for gpu in linked if gpu.links_active < most]
    if not most:
        found = f"all links of {len(linked)} GPUs are down"
        yield Check("NVLink", Grade.WARN, found, advice="check the fabric manager (nvidia-fabricmanager)")
    elif down:
        told = ", ".join(f"GPU {gpu.index} has {gpu.links_active} of {most} links" for gpu in down)
        advice = "run nvidia-smi nvlink -s; reseat or replace the GPU"
        yield Check("NVLink", Grade.FAIL, told, f"{most} links each", advice)
    else:
        yield _link_errors(linked, most)


def _link_errors(gpus: Sequence[Gpu], most: int) -> Check:
    restarted = [
        f"GPU {gpu.index} link {link.number}: {link.recoveries}"
        for gpu in gpus
        for link in gpu.links
        if link.recoveries
    ]
    if restarted:
        found = "links that lost their connection and recovered it: " + ", ".join(restarted)
        advice = "run nvidia-smi nvlink -e; if the numbers grow, reseat or replace the GPU"
        return Check("NVLink", Grade.WARN, found, "no recoveries", advice)
    return Check("NVLink", Grade.OK, f"{most} links of each GPU are up", f"{most} links each")


def _fabric(gpus: Sequence[Gpu]) -> Iterator[Check]:
    known = [(gpu, gpu.fabric) for gpu in gpus if gpu.fabric is not None and gpu.fabric.is_used]
    waiting = [gpu for gpu, fabric in known if not fabric.is_ready]
    if waiting:
        found = f"GPU {_named(waiting)}: the NVLink fabric is not set up"
        advice = "start nvidia-fabricmanager, in the release of the driver; without it CUDA reports error 802"
        yield Check("NVLink fabric", Grade.WARN, found, "set up", advice)
    elif known:
        yield Check("NVLink fabric", Grade.OK, "set up", "set up")


def _persistence(gpus: Sequence[Gpu]) -> Iterator[Check]:
    off = [gpu for gpu in gpus if gpu.persistence is False]
    if off:
        found = (
            f"off for GPU {_named(off)}: the driver initializes it again for each job, which takes seconds"
        )
        advice = "start nvidia-persistenced, or run nvidia-smi -pm 1"
        yield Check("GPU persistence", Grade.OK, found, advice=advice)


# --- the load test of each device ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One device: a matrix product that was compared with its known result, and a copy of memory."""

    device: str  # "cpu", "cuda:0", "xpu:0"
    name: str
    flops: float = 0.0
    copy_bps: float = 0.0  # bytes per second
    wrong: bool = False
    problem: str = ""


# of any healthy CPU and GPU of NVIDIA; nothing is known of others. The comparison with its peers is more exact.
_FLOORS = {"cpu": (1e9, GB // 2), "cuda": (1e12, 50 * GB)}
_PEER_FRACTION = 0.8


def judge_self_test(result: SelfTest, peers: Sequence[SelfTest]) -> Check:
    """`peers`: all devices of the node, this one included. GPUs of the same model must have similar speed."""
    name = f"load test of {'the CPU' if result.device == 'cpu' else 'GPU ' + result.device.partition(':')[2]}"
    if result.problem:
        return Check(
            name,
            Grade.FAIL,
            result.problem,
            advice="stop other programs and run doctor again; check the kernel log",
        )
    if result.wrong:
        return Check(
            name,
            Grade.FAIL,
            "a matrix product was wrong",
            advice="replace the device, and do not use its results",
        )
    alike = sorted(each.flops for each in peers if each.name == result.name and not each.problem)
    flops_floor, copy_floor = _FLOORS["cuda" if result.device.startswith("cuda") else "cpu"]
    behind = bool(alike) and result.flops < alike[len(alike) // 2] * _PEER_FRACTION
    below = result.flops < flops_floor or result.copy_bps < copy_floor
    found = f"{result.flops / 1e9:,.0f} GFLOP/s, copies {of_bytes(result.copy_bps)}/s"
    if behind:
        return Check(
            name,
            Grade.FAIL,
            f"{found}; its peers reach {alike[len(alike) // 2] / 1e9:,.0f}",
            f"at least {_PEER_FRACTION:.0%} of the speed of its peers",
            "check its temperature, power limit and clocks (nvidia-smi -q -d PERFORMANCE)",
        )
    return Check(
        name,
        Grade.WARN if below else Grade.OK,
        found,
        f"at least {flops_floor / 1e9:,.0f} GFLOP/s, {of_bytes(copy_floor)}/s",
        "perhaps another program uses the device, or its clock is limited" if below else "",
    )


# --- turns what a health source says about this node into a check -----------------------------------

NAME = "health source"
_SHOWN = 5


def name_of(place: str) -> str:
    return f"{NAME} {place}"


def judge_source(place: str, found: Sequence[HealthFinding]) -> Check:
    bad = [finding for finding in found if finding.severity is Severity.UNFIT]
    warns = [finding for finding in found if finding.severity is Severity.WARNING]
    if bad:
        advice = "repair the node, or leave a finding out with --health-ignore NAME"
        return Check(name_of(place), Grade.FAIL, _listed([*bad, *warns]), "nothing makes it unfit", advice)
    if warns:
        return Check(name_of(place), Grade.WARN, _listed(warns), "no warnings", "the node joins all the same")
    return Check(name_of(place), Grade.OK, _listed(found) or "reports no problem", "no problem")


def judge_failure(place: str, problem: str) -> Check:
    """A source that fails never keeps a node out."""
    advice = "check the source; until it answers, the job runs without it"
    return Check(name_of(place), Grade.WARN, f"not asked: {problem}", "an answer", advice)


def _listed(found: Sequence[HealthFinding]) -> str:
    more = len(found) - _SHOWN
    return "; ".join(map(str, found[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")


# --- placement --------------------------------------------------------------------------------------
#
# Where this node is in the network (`--topology`), and what its layout means for ranks. Without I/O.
#
# Slurm names the switches or blocks above a node in SLURM_TOPOLOGY_ADDR, "spine1.leaf4.node12", and what each part is
# in SLURM_TOPOLOGY_ADDR_PATTERN, "switch.switch.node". The last part is the node itself.

SLURM, NVLINK = "slurm", "nvlink"
_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
_NAME = "place in the network"


def place_of(asked: str, environ: Mapping[str, str], layout: Layout) -> tuple[str, str]:
    """The path of --topology, and why there is none. Both are empty if the option was not given."""
    if asked == SLURM:
        return _of_slurm(environ)
    if asked == NVLINK:
        return layout.block, "" if layout.block else "the GPUs of this node are in no NVLink domain"
    return asked, ""


def _of_slurm(environ: Mapping[str, str]) -> tuple[str, str]:
    parts = environ.get(_ADDRESS, "").split(".")
    kinds = environ.get(_PATTERN, "").split(".")
    if parts == [""]:
        return "", f"Slurm has not set {_ADDRESS}"
    if len(parts) < 2 or len(kinds) < 2:
        return "", "Slurm does not know the topology of this cluster (TopologyPlugin)"
    return "/".join(part.replace("/", "-") for part in parts[:-1]), ""


def judge_place(asked: str, block: str, problem: str) -> tuple[Check, ...]:
    if not asked:
        return ()
    if problem:
        advice = "give the place itself, for example --topology pod1/rack7, or leave --topology out"
        return (Check(_NAME, Grade.WARN, f"--topology {asked}: {problem}", "known", advice),)
    return (Check(_NAME, Grade.OK, block),)


def judge_layout(layout: Layout, numa_binding: str) -> tuple[Check, ...]:
    if not layout.gpus:
        return ()
    advice = ""
    if len(set(layout.nodes)) > 1 and not numa_binding:
        advice = "--numa-binding node keeps each rank on the CPUs near its GPU"
    return (Check("GPU topology", Grade.OK, in_words(layout), advice=advice),)


# --- A report of checks, as a table for people and as JSON for programs -----------------------------

_COLORS = {Grade.OK: "32", Grade.SKIPPED: "2", Grade.WARN: "33", Grade.FAIL: "31;1"}
_NAME_WIDTH = 34
_INDENT = 8


def table(report: Report, *, width: int = 100, color: bool = False) -> str:
    names = min(_NAME_WIDTH, max((len(check.name) for check in report.checks), default=0))
    lines = [f"{report.node}: {report.level} check, {report.took_s:.1f} s"]
    for check in report.checks:
        lines += _row(check, names, width, color)
    return "\n".join([*lines, _total(report.checks)])


def _row(check: Check, names: int, width: int, color: bool) -> list[str]:
    grade = f"{check.grade:7}"
    if color:
        grade = f"\x1b[{_COLORS[check.grade]}m{grade}\x1b[0m"
    left = _INDENT + names + 2
    floor = f" (required: {check.floor})" if check.floor and check.grade in (Grade.WARN, Grade.FAIL) else ""
    lines = wrap(check.found + floor, max(30, width - left), break_on_hyphens=False) or [""]
    name = check.name
    rows = [f"{grade} {name:{names}}  {lines[0]}" if len(name) <= names else f"{grade} {name}"]
    rows += [" " * left + line for line in (lines if len(name) > names else lines[1:])]
    if check.advice:
        rows += [
            " " * left + line
            for line in wrap("→ " + check.advice, max(30, width - left), break_on_hyphens=False)
        ]
    return rows


def _total(checks: Sequence[Check]) -> str:
    count = {grade: sum(1 for check in checks if check.grade is grade) for grade in Grade}
    if count[Grade.FAIL]:
        return f"failed: {_of(count[Grade.FAIL], 'check')} failed, {_of(count[Grade.WARN], 'warning')}"
    if count[Grade.WARN]:
        return f"passed, with {_of(count[Grade.WARN], 'warning')}"
    return "passed"


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def as_json(report: Report, **more: Any) -> dict[str, Any]:
    return {
        "node": report.node,
        "level": report.level,
        "fit": report.healthy,
        "exit_code": exit_code(report.checks),
        "took_s": round(report.took_s, 3),
        "block": report.block,
        "hardware": report.hardware,
        "versions": {name: getattr(report.versions, name) for name in report.versions.__slots__},
        "checks": [
            {
                "name": check.name,
                "grade": check.grade.value,
                "found": check.found,
                "floor": check.floor,
                "advice": check.advice,
            }
            for check in report.checks
        ],
        **more,
    }
