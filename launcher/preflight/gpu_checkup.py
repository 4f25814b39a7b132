"""Evaluates the state of the GPUs, from the driver and the kernel log.

A GPU that needs a reset or a replacement fails. Errors of the running program (Xid 13, 31, 43, 45) say nothing about
the device. A busy GPU is a warning: the job before may be just ending. Only GPUs that the job may use are judged: those
of CUDA_VISIBLE_DEVICES, if it is set.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from launcher.machine.xids import short_bus
from launcher.preflight.checkup import GB, Check, Grade, of_bytes, skipped
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from launcher.machine.gpu_state import Gpu, PcieLink, Process
    from launcher.machine.xids import Xid


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
        found = "; ".join(f"GPU {gpu.index}: {_taken(gpu)}" for gpu in busy)
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


def _taken(gpu: Gpu) -> str:
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
        found = f"off for GPU {_named(off)}: the driver initializes it anew for each job, which takes seconds"
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
