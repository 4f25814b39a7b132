"""Reads the GPUs of this node for each sample, with NVML; without a driver there is no GPU data.

Xid errors come from the kernel log if it is readable, because its lines also name the program. Otherwise NVML delivers
their numbers as events.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.machine import nvml as names
from launcher.machine.gpu_reading import read
from launcher.machine.gpu_state import GpuName, visible_indexes
from launcher.machine.kernel_log import PATH as KERNEL_LOG
from launcher.machine.kernel_log import KernelLog
from launcher.machine.xids import Xid, short_bus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.machine.gpu_state import Gpu
    from launcher.machine.nvml import Nvml

_MOST_XIDS = 16
_XID_EVENT = 0x8
_EVENT = struct.Struct("@PQQII")  # device, type, data, and which part of a divided GPU


def open_gpus(
    library: str = names.LIBRARY, kernel_log: str = KERNEL_LOG, environ: Mapping[str, str] | None = None
) -> Gpus | None:
    """The GPUs that CUDA_VISIBLE_DEVICES of `environ` (default: of this process) selects."""
    try:
        visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
        return Gpus(names.Nvml(library), kernel_log, visible)
    except (OSError, names.NvmlError):  # no driver, or it does not respond
        return None


class Gpus:
    def __init__(self, nvml: Nvml, kernel_log: str, visible: str | None) -> None:
        self._nvml = nvml
        handles = [nvml.handle("nvmlDeviceGetHandleByIndex_v2", index) for index in range(nvml.count())]
        known = [GpuName("", () if each is None else names.uuids_of(nvml, each)) for each in handles]
        self._indexes = tuple(sorted(set(visible_indexes(visible, known))))
        self._log: KernelLog | None = None
        self._events: Any = None
        if self._indexes:
            with suppress(OSError):
                self._log = KernelLog(kernel_log, from_end=True)
            if self._log is None:
                self._events = self._watched()

    def _watched(self) -> Any:
        """Return the set of Xid events, or None if the driver does not support it."""
        import ctypes

        nvml = self._nvml
        events = nvml.handle("nvmlEventSetCreate")
        watched = [
            nvml.code("nvmlDeviceRegisterEvents", device, ctypes.c_ulonglong(_XID_EVENT), events)
            for index in self._indexes
            if events is not None
            if (device := nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)) is not None
        ]
        return events if names.OK in watched else None

    def read(self) -> tuple[Gpu, ...]:
        """The GPUs, with the Xid errors since the previous call."""
        found = tuple(read(self._nvml, index) for index in self._indexes)
        xids = self._log.xids() if self._log is not None else self._events_since()
        return tuple(replace(gpu, xids=_of_gpu(gpu, xids)) for gpu in found) if xids else found

    def _events_since(self) -> tuple[Xid, ...]:
        xids: list[Xid] = []
        for _ in range(_MOST_XIDS if self._events is not None else 0):
            event = self._nvml.record("nvmlEventSetWait_v2", self._events, size=_EVENT.size, more=(0,))
            if not event:  # a timeout: nothing has happened
                break
            device, _, number, *_ = _EVENT.unpack(event)
            xids.append(Xid(short_bus(self._bus_of(device)), number))
        return tuple(xids)

    def _bus_of(self, device: int) -> str:
        import ctypes

        return names.address_of(self._nvml, ctypes.c_void_p(device)) or "0000:00:00.0"


def _of_gpu(gpu: Gpu, xids: tuple[Xid, ...]) -> tuple[Xid, ...]:
    return tuple(xid for xid in xids if gpu.bus and xid.bus == short_bus(gpu.bus))
