"""The state of one GPU as values, and which GPUs a list of visible devices selects.

A field is None if the driver does not report it for this model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
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


# --- layout -----------------------------------------------------------------------------------------
#
# How the GPUs of this node are connected: NVLink, NUMA nodes, and the network cards near them. Without I/O.

UNKNOWN_NODE = -1


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # "mlx5_0", "eth0"
    node: int  # NUMA node; UNKNOWN_NODE


@dataclass(frozen=True, slots=True)
class Layout:
    gpus: tuple[Gpu, ...] = ()
    nodes: tuple[int, ...] = ()  # the NUMA node of each GPU
    cards: tuple[Device, ...] = ()  # InfiniBand devices; without any, Ethernet interfaces
    numa_nodes: int = 1  # of the machine

    @property
    def block(self) -> str:
        """The NVLink domain of this node, if it can span nodes: its cluster and its clique."""
        known = {
            (gpu.fabric.cluster, gpu.fabric.clique)
            for gpu in self.gpus
            if gpu.fabric is not None and gpu.fabric.is_ready and gpu.fabric.cluster
        }
        ((cluster, clique),) = known if len(known) == 1 else {("", 0)}
        return f"{cluster}/{clique}" if cluster else ""


def in_words(layout: Layout) -> str:
    """One line for users; empty for a machine without GPUs."""
    if not layout.gpus:
        return ""
    models = Counter(gpu.name or "GPU" for gpu in layout.gpus)
    parts = [", ".join(f"{number} × {name}" for name, number in models.items()), _nvlink(layout.gpus)]
    return "; ".join(filter(None, (*parts, *_near(layout))))


def _nvlink(gpus: Sequence[Gpu]) -> str:
    active = [gpu.links_active for gpu in gpus]
    if not any(active):
        return "" if len(gpus) == 1 else "no NVLink"
    each = (
        f"{min(active)} links each" if min(active) == max(active) else f"{min(active)} to {max(active)} links"
    )
    if any(link.to_switch for gpu in gpus for link in gpu.links if link.active):
        return f"NVLink between all GPUs through switches, {each}"
    linked = sorted(_linked(gpus))
    if not linked:
        return f"NVLink, {each}"
    if len(linked) == len(gpus) * (len(gpus) - 1) // 2:
        return f"NVLink between all GPUs, {each}"
    return "NVLink between GPUs " + ", ".join(f"{one}-{other}" for one, other in linked)


def _linked(gpus: Sequence[Gpu]) -> dict[tuple[int, int], int]:
    """The number of links of each connected pair of GPUs, by their indexes."""
    index = {gpu.bus: gpu.index for gpu in gpus if gpu.bus}
    found: dict[tuple[int, int], int] = {}
    for gpu in gpus:
        for link in gpu.links:
            other = index.get(link.remote) if link.active and not link.to_switch else None
            if other is not None and other != gpu.index:
                pair = (min(gpu.index, other), max(gpu.index, other))
                found[pair] = found.get(pair, 0) + 1
    return found


def _near(layout: Layout) -> Iterable[str]:
    if layout.numa_nodes < 2:
        return
    homes: dict[int, list[str]] = {}
    for node in sorted({*layout.nodes, *(card.node for card in layout.cards)} - {UNKNOWN_NODE}):
        indexes = [gpu.index for gpu, home in zip(layout.gpus, layout.nodes, strict=True) if home == node]
        cards = [card.name for card in layout.cards if card.node == node]
        homes[node] = [*([f"GPU {ranges(indexes)}"] if indexes else []), *cards]
    yield from (f"NUMA node {node}: {', '.join(devices)}" for node, devices in homes.items() if devices)


def ranges(numbers: Sequence[int]) -> str:
    """ "0-3, 6"."""
    parts: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


# --- the memory of ranks that have ended -------------------------------------------------------------
#
# The driver frees the memory of a process some time after its end. A rank that starts earlier runs out of memory.

_TOLERANCE = 512 << 20  # beside the lowest use before: contexts of other programs come and go
_LONGEST_S, _UNCHANGED_S = 30.0, 5.0


@dataclass(frozen=True, slots=True)
class GpuMemory:
    index: int
    used: int
    owners: tuple[int, ...] = ()  # processes, as far as the driver names them


def still_held(
    found: Iterable[GpuMemory], lowest: Mapping[int, int], lives: Callable[[int], bool]
) -> tuple[GpuMemory, ...]:
    """The GPUs whose memory is not free yet. What only living processes hold is never freed by waiting."""
    return tuple(
        gpu
        for gpu in found
        if gpu.used > lowest.get(gpu.index, gpu.used) + _TOLERANCE
        and not (gpu.owners and all(map(lives, gpu.owners)))
    )


@dataclass(frozen=True, slots=True)
class MemoryWait:
    since: float
    fell_at: float
    lowest: int | None = None  # bytes in use in all, while waiting


def next_wait(wait: MemoryWait, used: int, now: float) -> tuple[MemoryWait, bool]:
    """The wait after a reading, and whether it is over: too long, or the memory in use does not fall."""
    if wait.lowest is None or used < wait.lowest:
        wait = replace(wait, fell_at=now, lowest=used)
    return wait, now - wait.since >= _LONGEST_S or now - wait.fell_at >= _UNCHANGED_S
