"""Reads what `launcher.ranks.affinity` needs: the CPUs this process may use, and the NUMA node of each GPU.

The kernel's sysfs has all of it except the order in which CUDA counts the GPUs. The driver library counts them by bus
address. CUDA does so too with CUDA_DEVICE_ORDER=PCI_BUS_ID. Without it the fastest model comes first, which is the same
order only if all GPUs are of one model.

Containers and small virtual machines often hide parts of sysfs. Missing parts are read as the simplest machine that
fits: one core per CPU, one cache per node, one socket, one node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from launcher.machine import gpu_reading
from launcher.machine.gpu_reading import text_of
from launcher.machine.gpu_state import GpuName, visible_indexes
from launcher.ranks.affinity import BindingError, Cpu, CpuTopology
from rendezvous.values.late_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    addresses: tuple[str, ...] = ()  # on the PCI bus, as sysfs spells them, in the ranks' order
    warning: str = ""


def read_topology(
    root: str = "/sys", gpus: Sequence[str] = (), allowed: Iterable[int] | None = None
) -> CpuTopology:
    """`gpus` are addresses from `visible_gpus`. `allowed` defaults to the CPUs this process may use."""
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    folder = f"{root}/devices/system/node"
    nodes = {
        cpu: int(name.removeprefix("node"))
        for name in _names(folder, "node")
        for cpu in parse_cpu_list(text_of(f"{folder}/{name}/cpulist"))
    }
    cpus = _read_cpus(f"{root}/devices/system/cpu", usable, nodes)
    several = len(dict.fromkeys(nodes.values())) > 1
    return CpuTopology(cpus, tuple(_node_of_gpu(root, address, several) for address in gpus))


def _read_cpus(folder: str, usable: list[int], nodes: dict[int, int]) -> tuple[Cpu, ...]:
    """Read each core and cache once for all CPUs that share it: large machines have hundreds of CPUs."""
    cores: dict[int, int] = {}
    sockets: dict[int, int] = {}
    caches: dict[int, int] = {}
    for index in usable:
        if index not in cores:
            siblings = parse_cpu_list(text_of(f"{folder}/cpu{index}/topology/thread_siblings_list")) or (
                index,
            )
            socket = int(text_of(f"{folder}/cpu{index}/topology/physical_package_id").strip() or 0)
            cores.update(dict.fromkeys(siblings, siblings[0]))
            sockets.update(dict.fromkeys(siblings, socket))
        if index not in caches:
            sharers = _sharers_of_largest_cache(f"{folder}/cpu{index}/cache")
            caches.update(dict.fromkeys(sharers, min(sharers, default=index)))
    whole_node = {nodes.get(index, 0): index for index in reversed(usable)}
    return tuple(
        Cpu(index, cores[index], caches.get(index, whole_node[node]), node, sockets[index])
        for index in usable
        for node in (nodes.get(index, 0),)
    )


def _sharers_of_largest_cache(folder: str) -> tuple[int, ...]:
    largest = 0
    sharers: tuple[int, ...] = ()
    for name in _names(folder, "index"):
        level = int(text_of(f"{folder}/{name}/level").strip() or 0)
        if level > largest and text_of(f"{folder}/{name}/type").strip() in ("Unified", "Data"):
            largest, sharers = level, parse_cpu_list(text_of(f"{folder}/{name}/shared_cpu_list"))
    return sharers


def _node_of_gpu(root: str, address: str, several_nodes: bool) -> int:
    """Return -1 if the firmware does not report the node. Like torchrun, the launcher then uses node 0."""
    text = text_of(f"{root}/bus/pci/devices/{address}/numa_node").strip()
    if not text and several_nodes:
        raise BindingError(
            f"GPU {address} has no known NUMA node",
            f"{root}/bus/pci/devices/{address}/numa_node cannot be read",
            "make it readable in this container or drop --numa-binding",
        )
    return max(int(text or 0), 0)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """ "0-2,7" in the kernel's notation."""
    ranges = [part.partition("-") for part in text.split(",") if part.strip()]
    return tuple(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def _names(folder: str, prefix: str) -> list[str]:
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in found if name.startswith(prefix) and name[len(prefix) :].isdecimal())


def visible_gpus(
    environ: Mapping[str, str], root: str = "/sys", library: str = gpu_reading.LIBRARY
) -> VisibleGpus:
    """Return the GPUs that a rank with this environment sees: none without a driver."""
    if gpus := gpu_reading.gpu_names(library):
        return _nvidia_order(gpus, environ)
    gpus = _amd_gpus(f"{root}/class/kfd/kfd/topology/nodes")
    for variable in ("ROCR_VISIBLE_DEVICES", _hip_variable(environ)):
        gpus = [gpus[index] for index in visible_indexes(environ.get(variable), gpus)]
    return VisibleGpus(tuple(gpu.address for gpu in gpus))


def _hip_variable(environ: Mapping[str, str]) -> str:
    return "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"


def _nvidia_order(gpus: list[GpuName], environ: Mapping[str, str]) -> VisibleGpus:
    chosen = visible_indexes(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    warning = ""
    if len({gpu.model for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        warning = (
            "--numa-binding: this machine has GPUs of several models, and CUDA may number them in another order "
            "than the driver. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that each rank is bound near its own GPU"
        )
    return VisibleGpus(tuple(gpus[index].address for index in chosen), warning)


def _amd_gpus(folder: str) -> list[GpuName]:
    """List GPUs in the kernel's order, which HIP keeps. Nodes that a container may not use cannot be read."""
    gpus = []
    for name in sorted(_names(folder, ""), key=int):
        lines = [line.split() for line in text_of(f"{folder}/{name}/properties").splitlines()]
        told = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
        if told.get("simd_count", 0) > 0:  # a node without SIMD units is a CPU
            # bus and slot; the higher bits distinguish partitions of one GPU
            bus, slot = told.get("location_id", 0) >> 8 & 0xFF, told.get("location_id", 0) >> 3 & 0x1F
            uuid = f"GPU-{told.get('unique_id', 0):016x}"
            gpus.append(GpuName(gpu_reading.pci_address(told.get("domain", 0), bus, slot), (uuid,)))
    return gpus
