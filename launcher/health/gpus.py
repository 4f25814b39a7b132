"""GPU data from NVML. Needs the package nvidia-ml-py and a driver; without them, no GPU data is reported.

Lower clocks because of a configured power cap are normal and are not reported. Only other throttling is reported:
temperature, power supply, hardware slowdown. An Xid error is a driver message in the kernel log; NVML delivers it as
an event.
"""

from __future__ import annotations

from typing import Any

from launcher.health.node_health import Gpu
from launcher.machine.nvml import binding

# Bits of nvml.h; versions of the Python binding use two different names for them.
_SLOWED_BY = {
    0x40: "its temperature",
    0x20: "its temperature",
    0x80: "an insufficient power supply",
    0x08: "a hardware slowdown",
}
_MOST_XIDS = 16


def open_gpus() -> Gpus | None:
    nvml = binding()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        return Gpus(nvml)
    except (nvml.NVMLError, AttributeError):  # no driver, or a binding with other names
        return None


class Gpus:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        self._reasons = newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        self._events = self._watched()

    def _watched(self) -> Any:
        """Return the set of Xid events, or None if the driver does not support it."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for device in self._devices:
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def read(self) -> tuple[Gpu, ...]:
        xids = self._xids()
        return tuple(self._one(i, device, tuple(xids.get(i, ()))) for i, device in enumerate(self._devices))

    def _xids(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        nvml = self._nvml
        for _ in range(_MOST_XIDS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                index = int(nvml.nvmlDeviceGetIndex(event.device))
            except nvml.NVMLError:  # a timeout: nothing has happened
                break
            found.setdefault(index, []).append(int(event.eventData))
        return found

    def _one(self, index: int, device: Any, xids: tuple[int, ...]) -> Gpu:
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            reasons = int(self._reasons(device))
            temperature = int(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))
            slowed_by = [word for bit, word in _SLOWED_BY.items() if reasons & bit]
            return Gpu(
                index,
                int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
                temperature,
                int(memory.used),
                int(memory.total),
                tuple(dict.fromkeys(slowed_by)),
                self._ecc(device),
                xids,
            )
        except nvml.NVMLError as error:
            return Gpu(index, xids=xids, lost=str(error))

    def _ecc(self, device: Any) -> int:
        nvml = self._nvml
        try:
            kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            return int(nvml.nvmlDeviceGetTotalEccErrors(device, kind, since))
        except nvml.NVMLError:
            return 0  # the GPU has no ECC counters
