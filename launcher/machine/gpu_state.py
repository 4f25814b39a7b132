"""The state of one GPU as values, and which GPUs a list of visible devices selects.

A field is None if the driver does not report it for this model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.machine.xids import Xid


@dataclass(frozen=True, slots=True)
class GpuName:
    """By which names a GPU is known."""

    address: str  # on the PCI bus, as sysfs spells it: "0000:cb:00.0"
    uuids: tuple[str, ...] = ()  # its own, then those of the MIG instances it is split into
    model: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A program that has memory on a GPU. Its name is empty if it runs in another container."""

    pid: int
    memory: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'a program'} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class PcieLink:
    width: int
    most_width: int
    generation: int
    most_generation: int  # of this GPU in this machine


@dataclass(frozen=True, slots=True)
class NvLink:
    number: int
    active: bool
    remote: str = ""  # address of the other end, if the driver reports it
    to_switch: bool = False
    recoveries: int | None = (
        None  # how often it lost its connection and recovered it, since the driver was loaded
    )


@dataclass(frozen=True, slots=True)
class Fabric:
    """The part of NVLink that the fabric manager sets up. GPUs with the same cluster and clique reach each other."""

    state: int
    status: int = 0  # an error code of NVML
    cluster: str = ""
    clique: int = 0

    @property
    def is_used(self) -> bool:
        return self.state != FABRIC_NOT_SUPPORTED

    @property
    def is_ready(self) -> bool:
        return self.state == FABRIC_COMPLETED and self.status == 0


FABRIC_NOT_SUPPORTED, FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED = range(4)


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str = ""
    bus: str = ""  # address on the PCI bus
    uuids: tuple[str, ...] = ()
    lost: str = ""  # why the GPU does not respond
    memory_total: int = 0
    memory_used: int = 0
    utilization: int | None = None  # percent
    temperature: int | None = None
    slowed_by: tuple[str, ...] = ()  # why its clocks are lower than configured: temperature, power supply
    ecc_uncorrected: int | None = None  # since the last reset
    ecc_lifetime: int | None = None
    reset_needed: bool | None = None  # faulty pages or rows will be retired at the next GPU reset
    worn_out: bool | None = None  # no spare rows are left to remap
    xids: tuple[Xid, ...] = ()  # since the previous reading
    # Only read for pre-flight checks:
    remapped_rows: int | None = None
    retired_pages: int | None = None
    performance_state: int | None = None  # 0: full speed
    persistence: bool | None = None
    pcie: PcieLink | None = None
    links: tuple[NvLink, ...] = ()
    fabric: Fabric | None = None
    processes: tuple[Process, ...] = ()

    @property
    def links_active(self) -> int:
        return sum(1 for link in self.links if link.active)


def visible_indexes(visible: str | None, gpus: Sequence[GpuName]) -> tuple[int, ...]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: it ends at the first entry that names no device, and a repeated entry
    voids it.

    Entries are either all numbers or all UUIDs of one kind. A UUID may be shortened as long as it is unambiguous.
    """
    if visible is None:
        return tuple(range(len(gpus)))
    entries = [entry.strip() for entry in visible.split(",")]
    kind = next((kind for kind in ("GPU-", "MIG-") if entries[0].startswith(kind)), "")
    chosen: list[int] = []
    seen: list[str] = []
    for entry in entries:
        named = _named_by(entry, kind, gpus)
        if len(named) != 1:
            break
        # Two MIG instances on one GPU are two devices; two ways to write one GPU are not.
        seen.append(entry if kind == "MIG-" else str(named[0]))
        chosen.append(named[0])
    return tuple(chosen) if len(seen) == len(dict.fromkeys(seen)) else ()


def _named_by(entry: str, kind: str, gpus: Sequence[GpuName]) -> tuple[int, ...]:
    if not kind:
        return (int(entry),) if entry.isdecimal() and int(entry) < len(gpus) else ()
    if not entry.startswith(kind):
        return ()
    if entry.startswith("MIG-GPU-"):  # older drivers: MIG-<UUID of the GPU>/<instance>/<instance>
        entry = entry.removeprefix("MIG-").partition("/")[0]
    return tuple(index for index, gpu in enumerate(gpus) if any(uuid.startswith(entry) for uuid in gpu.uuids))
