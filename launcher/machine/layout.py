"""How the GPUs of this node are connected: NVLink, NUMA nodes, and the network cards near them. Without I/O."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from launcher.machine.gpu_state import GpuName, visible_indexes
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from launcher.machine.gpu_state import Gpu

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


def order_by_links(gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """The GPUs in an order in which linked GPUs are neighbours, for CUDA_VISIBLE_DEVICES. Empty if the present order is
    as good, or if all GPUs are linked alike.

    NCCL finds the links by itself, whatever the order is. The order matters to scripts that form groups of neighbouring
    ranks, for example for tensor parallelism.
    """
    links = _linked(gpus)
    present = [gpu.index for gpu in gpus]
    if not links or len(links) == len(gpus) * (len(gpus) - 1) // 2:
        return ()
    ordered, left = present[:1], present[1:]
    while left:
        last = ordered[-1]
        nearest = max(left, key=lambda each: (links.get((min(last, each), max(last, each)), 0), -each))
        ordered.append(nearest)
        left.remove(nearest)
    better = _neighbours(ordered, links) > _neighbours(present, links)
    return tuple(ordered) if better else ()


def visible_by_links(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[str, str]:
    """CUDA_VISIBLE_DEVICES with linked GPUs beside each other; empty if it can stay. The second text says why not."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        return "", "there is no NVIDIA driver"
    if [gpu.index for gpu in gpus] != list(range(len(gpus))):
        return "", "a GPU does not respond"
    chosen = visible_indexes(visible, [GpuName(gpu.bus, gpu.uuids, gpu.name) for gpu in gpus])
    entries = (
        [entry.strip() for entry in visible.split(",")] if visible is not None else [str(i) for i in chosen]
    )
    if any(entry.startswith("MIG-") for entry in entries):
        return "", "instances of a divided GPU (MIG) are not linked"
    mixed = len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if mixed and not entries[0].startswith("GPU-"):
        return "", "CUDA may number GPUs of several models in another order; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    order = order_by_links([gpus[index] for index in chosen])
    return ",".join(entries[chosen.index(index)] for index in order), ""


def _neighbours(order: Sequence[int], links: Mapping[tuple[int, int], int]) -> int:
    """The links between the neighbours of each pair 0-1, 2-3, ..., and, weighted less, of all neighbours."""
    steps = [links.get((min(one, other), max(one, other)), 0) for one, other in pairwise(order)]
    return 1000 * sum(steps[::2]) + sum(steps)
