"""Reads the GPUs of this machine through NVML, the library of the NVIDIA driver."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.machine.gpu_state import (
    UNKNOWN_NODE,
    Device,
    Fabric,
    Gpu,
    GpuMemory,
    GpuName,
    Layout,
    NvLink,
    PcieLink,
    Process,
)

if TYPE_CHECKING:
    import ctypes


# Reads files and directories in /proc and /sys. Returns an empty value if one does not exist.


def names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


# --- the driver's library --------------------------------------------------------------------------
#
# NVML, the library of the NVIDIA driver, through its C interface: no Python package is needed.
#
# `Nvml` calls the functions of nvml.h. A function that this driver does not have, or that does not apply to a
# model, gives None. The layouts of the structures are those of nvml.h; they have not changed since the names of the
# functions got their suffixes (`_v2`, `_v3`).

LIBRARY = "libnvidia-ml.so.1"
OK, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_SIZE, NOT_FOUND_HERE = 0, 3, 4, 7, 13
# The GPU responds, but this function does not apply to it, or not to this user.
_HARMLESS = (OK, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND_HERE)
_LIBRARY_MISMATCH = 18
_TEXT_BYTES = 128  # more than NVML requires for any name, UUID or PCI record
_MIG_LIMIT = 8  # no GPU can be split further


class NvmlError(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code

    @property
    def is_mismatch(self) -> bool:
        return self.code == _LIBRARY_MISMATCH


class Nvml:
    """An initialized library. Arguments after the name are those of the function, without the result."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raise OSError if the library is missing, and NvmlError if it cannot reach the driver."""
        import ctypes  # late, because only jobs on GPUs need it

        self._c = ctypes
        self._library = ctypes.CDLL(library)
        if code := self.code("nvmlInit_v2"):
            raise NvmlError(code, self.words(code))

    def close(self) -> None:
        self.code("nvmlShutdown")

    def code(self, name: str, *of: Any) -> int:
        function = getattr(self._library, name, None)
        return NOT_FOUND_HERE if function is None else int(function(*of))

    def words(self, code: int) -> str:
        function = getattr(self._library, "nvmlErrorString", None)
        if function is None:
            return f"error {code}"
        function.restype = self._c.c_char_p
        text = function(code)
        return text.decode(errors="replace") if text else f"error {code}"

    def number(self, name: str, *of: Any) -> int | None:
        value = self._c.c_uint(0)
        return value.value if self.code(name, *of, self._c.byref(value)) == OK else None

    def long(self, name: str, *of: Any) -> int | None:
        value = self._c.c_ulonglong(0)
        return value.value if self.code(name, *of, self._c.byref(value)) == OK else None

    def text(self, name: str, *of: Any) -> str:
        buffer = self._c.create_string_buffer(_TEXT_BYTES)
        return (
            buffer.value.decode(errors="replace") if self.code(name, *of, buffer, _TEXT_BYTES) == OK else ""
        )

    def handle(self, name: str, *of: Any) -> ctypes.c_void_p | None:
        value = self._c.c_void_p()
        return value if self.code(name, *of, self._c.byref(value)) == OK else None

    def record(self, name: str, *of: Any, size: int = _TEXT_BYTES, more: tuple[Any, ...] = ()) -> bytes:
        """The bytes of a structure; empty if the call fails. `more`: arguments after the structure."""
        buffer = self._c.create_string_buffer(size)
        return buffer.raw if self.code(name, *of, buffer, *more) == OK else b""

    def array(self, name: str, device: Any, limit: int, size: int) -> tuple[int, bytes] | None:
        """Call a function that fills an array: the number of its elements, and their bytes."""
        length = self._c.c_uint(limit)
        buffer = self._c.create_string_buffer(limit * size)
        code = self.code(name, device, self._c.byref(length), buffer)
        return (min(length.value, limit), buffer.raw) if code == OK else None

    def length(self, name: str, *of: Any) -> int | None:
        """The number of elements that an array would have."""
        value = self._c.c_uint(0)
        code = self.code(name, *of, self._c.byref(value), None)
        return value.value if code in (OK, INSUFFICIENT_SIZE) else None

    def problem(self, name: str, *of: Any) -> str:
        """Why a device does not respond; "" if it does."""
        code = self.code(name, *of)
        return "" if code in _HARMLESS else self.words(code)

    def count(self) -> int:
        return self.number("nvmlDeviceGetCount_v2") or 0


@contextlib.contextmanager
def driver(library: str = LIBRARY) -> Iterator[Nvml | None]:
    """Yield the library, or None if it is missing or its initialization fails."""
    nvml: Nvml | None = None
    with contextlib.suppress(OSError, NvmlError):
        nvml = Nvml(library)
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.close()


def gpu_names(library: str = LIBRARY) -> list[GpuName]:
    """The GPUs of this machine in the order of their bus addresses; those that do not respond are left out."""
    with driver(library) as nvml:
        if nvml is None:
            return []
        handles = [nvml.handle("nvmlDeviceGetHandleByIndex_v2", index) for index in range(nvml.count())]
        return [_named(nvml, handle) for handle in handles if handle is not None]


def _named(nvml: Nvml, gpu: ctypes.c_void_p) -> GpuName:
    return GpuName(address_of(nvml, gpu), uuids_of(nvml, gpu), nvml.text("nvmlDeviceGetName", gpu))


def uuids_of(nvml: Nvml, gpu: ctypes.c_void_p) -> tuple[str, ...]:
    parts = [nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index) for index in range(_MIG_LIMIT)]
    return tuple(nvml.text("nvmlDeviceGetUUID", each) for each in (gpu, *parts) if each is not None)


def address_of(nvml: Nvml, gpu: ctypes.c_void_p) -> str:
    return pci_address_of(nvml.record("nvmlDeviceGetPciInfo_v3", gpu))


def pci_address_of(record: bytes) -> str:
    """nvmlPciInfo_t: 16 bytes of the legacy bus id, then domain, bus and slot, then more."""
    import struct

    return pci_address(*struct.unpack_from("16x3I", record)) if record else ""


def pci_address(domain: int, bus: int, slot: int) -> str:
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


# --- GPUs ------------------------------------------------------------------------------------------
#
# Reads the state of GPUs with NVML. `read` is short enough for each sample; `read_all` is for pre-flight checks.
#
# Lower clocks because of a configured power cap are normal and are not reported. Only other throttling is reported:
# temperature, power supply, hardware slowdown.

# Bits of nvml.h
_SLOWED_BY = {
    0x40: "its temperature",
    0x20: "its temperature",
    0x80: "an insufficient power supply",
    0x08: "a hardware slowdown",
}
_UNCORRECTED, _VOLATILE = 1, 0
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
    gpu = replace(read(nvml, index), uuids=uuids_of(nvml, device))
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
    name, bus = nvml.text("nvmlDeviceGetName", device), address_of(nvml, device)
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
        pci_address_of(nvml.record("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link)),
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


def read_layout(root: str = "/sys", library: str = LIBRARY) -> Layout:
    """A layout without GPUs if there is no driver."""
    with driver(library) as opened:
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
