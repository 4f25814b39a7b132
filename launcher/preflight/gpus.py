"""Gathers the data of GPUs for their checks: from NVML, the PCIe bus and the kernel log."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.machine import nvml
from launcher.machine.gpu_reading import read_all
from launcher.machine.gpu_state import Gpu, GpuName, visible_indexes
from launcher.machine.kernel_log import PATH as KERNEL_LOG
from launcher.machine.kernel_log import logged_xids
from launcher.machine.small_files import text_of
from launcher.preflight.gpu_checkup import Gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_MODULE = "/proc/driver/nvidia/version"


def gpus(environ: Mapping[str, str], library: str = nvml.LIBRARY, kernel_log: str = KERNEL_LOG) -> Gpus:
    on_bus = _on_bus()
    found = _ask_driver(library)
    if not found.present and not on_bus and not os.path.exists(_MODULE):
        return Gpus(problem=found.problem, mismatch=found.mismatch)
    xids, readable = logged_xids(kernel_log)
    chosen = visible_indexes(environ.get("CUDA_VISIBLE_DEVICES"), [_name(gpu) for gpu in found.gpus])
    return replace(
        found,
        gpus=tuple(found.gpus[index] for index in sorted(set(chosen))),
        on_bus=on_bus,
        xids=xids,
        log_readable=readable,
        uptime_s=time.clock_gettime(time.CLOCK_MONOTONIC),
    )


def _name(gpu: Gpu) -> GpuName:
    return GpuName(gpu.bus, gpu.uuids, gpu.name)


def _ask_driver(library: str) -> Gpus:
    try:
        opened = nvml.Nvml(library)
    except OSError:
        return Gpus()  # no driver
    except nvml.NvmlError as error:
        module = f" (kernel module: {version})" if error.is_mismatch and (version := _module()) else ""
        return Gpus(problem=f"the driver does not respond: {error}{module}", mismatch=error.is_mismatch)
    try:
        found = tuple(read_all(opened, index) for index in range(opened.count()))
        return Gpus(found, len(found), driver=opened.text("nvmlSystemGetDriverVersion"))
    finally:
        opened.close()


def _module() -> str:
    """The release of the driver's kernel module, such as 550.54.14."""
    words = text_of(_MODULE).split("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _on_bus() -> int:
    root, count = "/sys/bus/pci/devices", 0
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            device = f"{root}/{name}"
            if text_of(f"{device}/vendor").strip() == _NVIDIA and _is_display(text_of(f"{device}/class")):
                count += 1
    return count


def _is_display(pci_class: str) -> bool:
    return pci_class[:6] in _DISPLAYS
