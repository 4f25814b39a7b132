"""Evaluates the state of the GPUs, from the driver and the kernel log.

A GPU that needs a reset or a replacement fails. Errors of the running program (Xid 13, 31, 43, 45) say nothing about
the device. A busy GPU is a warning: the job before may be just ending.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.preflight.checkup import GB, Check, Grade, of_bytes, skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of one GPU. A field is None if the driver does not report it."""

    index: int
    name: str
    bus: str = ""
    memory_total: int = 0
    memory_used: int = 0
    utilization: int | None = None  # percent
    temperature: int | None = None
    ecc_uncorrected: int | None = None  # since the last reset
    reset_needed: bool | None = None  # faulty pages or rows will be retired at the next GPU reset
    worn_out: bool | None = None  # no spare rows are left to remap
    links_active: int | None = None  # NVLink
    links: int | None = None


@dataclass(frozen=True, slots=True)
class Xid:
    """A driver message (Xid) in the kernel log."""

    bus: str
    code: int
    ago_s: float


@dataclass(frozen=True, slots=True)
class Gpus:
    gpus: tuple[Gpu, ...] = ()
    on_bus: int = 0  # NVIDIA GPUs on the PCIe bus; 0: unknown
    xids: tuple[Xid, ...] = ()
    log_readable: bool = False
    problem: str = ""  # why the driver does not respond
    source: str = ""


_IDLE_FRACTION = 0.1
_IDLE_BYTES = GB
_RECENT_S = 3600.0
# Errors of the device, not of the program that ran on it.
_XIDS = {
    48: "an uncorrectable memory error",
    62: "its microcontroller halted",
    63: "a memory row or page was retired",
    64: "a memory row or page could not be retired",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many memory errors that could be corrected",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its system processor does not respond",
    120: "its system processor failed",
    140: "an unrecovered memory error",
}
_FATAL_XIDS = (62, 64, 79, 95, 119, 120, 140)


def judge_gpus(found: Gpus, *, wanted: bool) -> tuple[Check, ...]:
    """`wanted`: the user requested GPUs (--nproc-per-node gpu)."""
    if not found.gpus:
        return (_none(found, wanted),)
    missing = found.on_bus - len(found.gpus)
    present = f"{len(found.gpus)} × {found.gpus[0].name}"
    if missing > 0:
        lost = f"{found.on_bus} GPUs on the PCIe bus, but the driver reports only {len(found.gpus)}"
        first = Check(
            "GPUs", Grade.FAIL, lost, advice="look for Xid 79 in the kernel's log; reboot the machine"
        )
    else:
        first = Check("GPUs", Grade.OK, f"{present} ({found.source})")
    return first, _idle(found.gpus), *_memory_errors(found.gpus), _xids(found), *_links(found.gpus)


def _none(found: Gpus, wanted: bool) -> Check:
    if found.problem and (found.on_bus or wanted):
        advice = "run nvidia-smi to see more; reload the driver or reboot the machine"
        return Check("GPUs", Grade.FAIL, found.problem, advice=advice)
    if found.on_bus:
        advice = "install the driver, or pass the devices to this container (--gpus all)"
        return Check(
            "GPUs", Grade.WARN, f"{found.on_bus} on the bus, but the driver is not installed", advice=advice
        )
    return skipped("GPUs", "this machine has no NVIDIA GPU")


def _named(gpus: Iterable[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _idle(gpus: Sequence[Gpu]) -> Check:
    busy = [gpu for gpu in gpus if gpu.memory_used > max(_IDLE_BYTES, gpu.memory_total * _IDLE_FRACTION)]
    if not busy:
        return Check(
            "GPUs idle",
            Grade.OK,
            "the GPU memory is free",
            f"at most {_IDLE_FRACTION:.0%} of the memory in use",
        )
    taken = ", ".join(
        f"GPU {gpu.index}: {of_bytes(gpu.memory_used)} of {of_bytes(gpu.memory_total)} used" for gpu in busy
    )
    return Check(
        "GPUs idle",
        Grade.WARN,
        taken,
        f"at most {_IDLE_FRACTION:.0%} of the memory in use",
        "find the processes with nvidia-smi, and end them",
    )


def _memory_errors(gpus: Sequence[Gpu]) -> tuple[Check, ...]:
    if all(gpu.ecc_uncorrected is None and gpu.reset_needed is None for gpu in gpus):
        return (skipped("GPU memory errors", "not checked: these GPUs have no ECC counters"),)
    worn = [gpu for gpu in gpus if gpu.worn_out]
    reset = [gpu for gpu in gpus if gpu.reset_needed or gpu.ecc_uncorrected]
    if worn:
        found = f"GPU {_named(worn)}: no spare memory rows are left"
        return (Check("GPU memory errors", Grade.FAIL, found, "none", "replace the GPU"),)
    if reset:
        told = ", ".join(f"GPU {gpu.index}: {_what_is_wrong(gpu)}" for gpu in reset)
        advice = (
            "reset the GPU (nvidia-smi --gpu-reset, after its processes have ended), or reboot the machine"
        )
        return (Check("GPU memory errors", Grade.FAIL, told, "none", advice),)
    return (Check("GPU memory errors", Grade.OK, "none", "none"),)


def _what_is_wrong(gpu: Gpu) -> str:
    if gpu.ecc_uncorrected:
        return f"{gpu.ecc_uncorrected} uncorrectable since the last reset"
    return "faulty memory rows will be retired at the next GPU reset"


def _xids(found: Gpus) -> Check:
    if not found.log_readable:
        return skipped("Xid errors", "not checked: the kernel log is not readable")
    of_device = [xid for xid in found.xids if xid.code in _XIDS]
    if not of_device:
        return Check("Xid errors", Grade.OK, "no Xid error caused by a GPU", "none")
    worst = min(of_device, key=lambda xid: (not _is_fatal(xid), xid.ago_s))
    told = f"Xid {worst.code} of {worst.bus}, {worst.ago_s / 60:.0f} min ago: {_XIDS[worst.code]}"
    grade = Grade.FAIL if _is_fatal(worst) else Grade.WARN
    return Check(
        "Xid errors",
        grade,
        told,
        "none",
        "reset the GPU or reboot the machine; replace it if the error occurs again",
    )


def _is_fatal(xid: Xid) -> bool:
    return xid.code in _FATAL_XIDS and xid.ago_s < _RECENT_S


def _links(gpus: Sequence[Gpu]) -> tuple[Check, ...]:
    linked = [gpu for gpu in gpus if gpu.links]
    if not linked:
        return ()
    most = max(gpu.links_active or 0 for gpu in linked)
    down = [gpu for gpu in linked if (gpu.links_active or 0) < most]
    if not most:
        found = f"all links of {len(linked)} GPUs are down"
        return (Check("NVLink", Grade.WARN, found, advice="check the fabric manager (nvidia-fabricmanager)"),)
    if down:
        told = ", ".join(f"GPU {gpu.index} has {gpu.links_active} of {most} links" for gpu in down)
        return (
            Check(
                "NVLink",
                Grade.FAIL,
                told,
                f"{most} links each",
                "run nvidia-smi nvlink -s; reseat or replace the GPU",
            ),
        )
    return (Check("NVLink", Grade.OK, f"{most} links of each GPU are up", f"{most} links each"),)


# --- texts ---------------------------------------------------------------------------------------------

SMI_FIELDS = (
    "index",
    "name",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
)


def read_smi(text: str) -> tuple[Gpu, ...]:
    """Parse the output of nvidia-smi --query-gpu=SMI_FIELDS --format=csv,noheader,nounits."""
    return tuple(_gpu(cells) for line in text.splitlines() if len(cells := _cells(line)) == len(SMI_FIELDS))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _gpu(cells: list[str]) -> Gpu:
    index, name, bus, total, used, utilization, temperature, errors, pending = cells
    return Gpu(
        int(index),
        name,
        bus.lower(),
        (_number(total) or 0) << 20,
        (_number(used) or 0) << 20,
        _number(utilization),
        _number(temperature),
        _number(errors),
        {"yes": True, "no": False}.get(pending.lower()),
    )


def _number(text: str) -> int | None:
    """ "[N/A]", "[Not Supported]", and "Unknown Error" become None."""
    return int(text) if text.isdecimal() else None


def read_remapped(text: str) -> dict[str, tuple[bool, bool]]:
    """Return by bus address: whether rows will be remapped at the next reset, and whether remapping has failed."""
    found = {}
    for line in text.splitlines():
        cells = [cell.lower() for cell in _cells(line)]
        if len(cells) == 3 and all(cell in ("yes", "no") or cell.isdecimal() for cell in cells[1:]):
            found[cells[0]] = (cells[1] not in ("0", "no"), cells[2] not in ("0", "no"))
    return found


_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def read_xids(records: Iterable[str], uptime_s: float) -> tuple[Xid, ...]:
    """Records of /dev/kmsg: "level,sequence,microseconds since boot,...;text"."""
    xids = []
    for record in records:
        head, _, text = record.partition(";")
        found = _XID.search(text)
        stamp = head.split(",")[2:3]
        if found and stamp and stamp[0].isdecimal():
            xids.append(Xid(found[1].lower(), int(found[2]), max(0.0, uptime_s - int(stamp[0]) / 1e6)))
    return tuple(xids)


# --- the load test of each device ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One device: a matrix product that was compared with its known result, and a copy of memory."""

    device: str  # "cpu", "cuda:0"
    name: str
    flops: float = 0.0
    copy_bps: float = 0.0  # bytes per second
    wrong: bool = False
    problem: str = ""


# of any healthy device; the comparison with its peers is more exact
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
    flops_floor, copy_floor = _FLOORS["cpu" if result.device == "cpu" else "cuda"]
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
