"""Reads the state of GPUs with NVML. `read` is short enough for each sample; `read_all` is for pre-flight checks.

Lower clocks because of a configured power cap are normal and are not reported. Only other throttling is reported:
temperature, power supply, hardware slowdown.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.machine import nvml
from launcher.machine import nvml as names
from launcher.machine.gpu_state import (
    UNKNOWN_NODE,
    Device,
    Fabric,
    Gpu,
    GpuMemory,
    Layout,
    NvLink,
    PcieLink,
    Process,
)
from launcher.machine.small_files import names_in, text_of

if TYPE_CHECKING:
    from launcher.machine.nvml import Nvml


# Bits of nvml.h
_SLOWED_BY = {
    0x40: "its temperature",
    0x20: "its temperature",
    0x80: "an insufficient power supply",
    0x08: "a hardware slowdown",
}
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
_CORE_TEMPERATURE = 0
_MEMORY, _UTILIZATION = "3Q", "2I"
_LINKS = 36
_LINK_RECOVERY = 1  # a counter of link errors
_SWITCH = 2
_FABRIC = "16sIIB"
_PROCESS = struct.Struct("@IQII")
_PROCESSES = 64
_NO_MEMORY = (1 << 64) - 1  # the driver does not know it
_PAGE_CAUSES = (0, 1)  # several corrected errors, one uncorrectable error


def read_all(nvml: Nvml, index: int) -> Gpu:
    device = nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)
    if device is None:
        return read(nvml, index)
    gpu = replace(read(nvml, index), uuids=names.uuids_of(nvml, device))
    if gpu.lost:
        return gpu
    pages = [nvml.length("nvmlDeviceGetRetiredPages", device, cause) for cause in _PAGE_CAUSES]
    known = [count for count in pages if count is not None]
    persistence = nvml.number("nvmlDeviceGetPersistenceMode", device)
    return replace(
        gpu,
        remapped_rows=_rows(nvml, device)[0],
        retired_pages=sum(known) if known else None,
        performance_state=nvml.number("nvmlDeviceGetPerformanceState", device),
        persistence=None if persistence is None else bool(persistence),
        pcie=_pcie(nvml, device),
        links=_links(nvml, device),
        fabric=_fabric(nvml, device),
        processes=_processes(nvml, device),
    )


def read(nvml: Nvml, index: int) -> Gpu:
    code, device = _opened(nvml, index)
    if code:
        return Gpu(index, lost=nvml.words(code))
    name, bus = nvml.text("nvmlDeviceGetName", device), names.address_of(nvml, device)
    found = nvml.record("nvmlDeviceGetMemoryInfo", device)
    if not found and (lost := nvml.problem("nvmlDeviceGetMemoryInfo", device, _scratch())):
        return Gpu(index, name, bus, lost=lost)
    total, _, used = struct.unpack_from(_MEMORY, found) if found else (0, 0, 0)
    use = nvml.record("nvmlDeviceGetUtilizationRates", device)
    _, pending, failed = _rows(nvml, device)
    retiring = nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", device)
    return Gpu(
        index,
        name,
        bus,
        memory_total=total,
        memory_used=used,
        utilization=struct.unpack_from(_UTILIZATION, use)[0] if use else None,
        temperature=nvml.number("nvmlDeviceGetTemperature", device, _CORE_TEMPERATURE),
        slowed_by=_slowed_by(nvml, device),
        ecc_uncorrected=nvml.long("nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _VOLATILE),
        ecc_lifetime=nvml.long("nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _AGGREGATE),
        reset_needed=None if pending is None and retiring is None else bool(pending) or bool(retiring),
        worn_out=failed,
    )


def memory_of(nvml: Nvml, index: int) -> GpuMemory:
    device = nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)
    found = b"" if device is None else nvml.record("nvmlDeviceGetMemoryInfo", device)
    used = struct.unpack_from(_MEMORY, found)[2] if found else 0
    return GpuMemory(index, used, tuple(each.pid for each in _processes(nvml, device)))


def _opened(nvml: Nvml, index: int) -> tuple[int, Any]:
    import ctypes

    device = ctypes.c_void_p()
    return nvml.code("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device)), device


def _scratch() -> Any:
    import ctypes

    return ctypes.create_string_buffer(128)


def _slowed_by(nvml: Nvml, device: Any) -> tuple[str, ...]:
    reasons = nvml.long("nvmlDeviceGetCurrentClocksEventReasons", device)
    if reasons is None:  # the name in older drivers
        reasons = nvml.long("nvmlDeviceGetCurrentClocksThrottleReasons", device)
    return tuple(dict.fromkeys(word for bit, word in _SLOWED_BY.items() if (reasons or 0) & bit))


def _rows(nvml: Nvml, device: Any) -> tuple[int | None, bool | None, bool | None]:
    """The number of remapped rows, whether more wait for a reset, and whether remapping has failed."""
    import ctypes

    found = [ctypes.c_uint(0) for _ in range(4)]
    if nvml.code("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, found)):
        return None, None, None
    corrected, uncorrected, pending, failed = (each.value for each in found)
    return corrected + uncorrected, bool(pending), bool(failed)


def _pcie(nvml: Nvml, device: Any) -> PcieLink | None:
    asked = ("CurrPcieLinkWidth", "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration")
    found = [nvml.number(f"nvmlDeviceGet{each}", device) for each in asked]
    known = [number for number in found if number]
    return PcieLink(*known) if len(known) == len(asked) else None


def _links(nvml: Nvml, device: Any) -> tuple[NvLink, ...]:
    states = [(link, nvml.number("nvmlDeviceGetNvLinkState", device, link)) for link in range(_LINKS)]
    return tuple(
        _link(nvml, device, link) if state else NvLink(link, active=False)
        for link, state in states
        if state is not None
    )


def _link(nvml: Nvml, device: Any, link: int) -> NvLink:
    return NvLink(
        link,
        True,
        names.pci_address_of(nvml.record("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link)),
        nvml.number("nvmlDeviceGetNvLinkRemoteDeviceType", device, link) == _SWITCH,
        nvml.long("nvmlDeviceGetNvLinkErrorCounter", device, link, _LINK_RECOVERY),
    )


def _fabric(nvml: Nvml, device: Any) -> Fabric | None:
    found = nvml.record("nvmlDeviceGetGpuFabricInfo", device)
    if not found:
        return None
    cluster, status, clique, state = struct.unpack_from(_FABRIC, found)
    return Fabric(state, status, cluster.hex() if any(cluster) else "", clique)


def _processes(nvml: Nvml, device: Any) -> tuple[Process, ...]:
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        found = nvml.array(name, device, _PROCESSES, _PROCESS.size)
        if found is not None:
            number, data = found
            rows = [_PROCESS.unpack_from(data, at * _PROCESS.size) for at in range(number)]
            return tuple(
                Process(pid, 0 if memory == _NO_MEMORY else memory, text_of(f"/proc/{pid}/comm").strip())
                for pid, memory, *_ in rows
            )
    return ()


# --- reads how GPUs and network cards of this node are connected, from NVML and sysfs ---------------


def read_layout(root: str = "/sys", library: str = nvml.LIBRARY) -> Layout:
    """A layout without GPUs if there is no driver."""
    with nvml.driver(library) as opened:
        gpus = () if opened is None else tuple(read_all(opened, index) for index in range(opened.count()))
    sound = tuple(gpu for gpu in gpus if not gpu.lost)
    if not sound:
        return Layout()
    homes = tuple(_node_of(f"{root}/bus/pci/devices/{gpu.bus}") for gpu in sound)
    cards = _devices(f"{root}/class/infiniband") or _devices(f"{root}/class/net")
    nodes = [
        name
        for name in names_in(f"{root}/devices/system/node")
        if name[:4] == "node" and name[4:].isdecimal()
    ]
    return Layout(sound, homes, cards, len(nodes))


def _devices(folder: str) -> tuple[Device, ...]:
    """Those that are hardware; a virtual interface has no file of a NUMA node."""
    found = [(name, text_of(f"{folder}/{name}/device/numa_node").strip()) for name in names_in(folder)]
    return tuple(Device(name, _number(text)) for name, text in found if text)


def _node_of(device: str) -> int:
    return _number(text_of(f"{device}/numa_node").strip())


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else UNKNOWN_NODE
