"""Reads GPU data with nvidia-ml-py, or with nvidia-smi if nvidia-ml-py is not installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import replace
from typing import Any

from launcher.machine.nvml import binding
from launcher.preflight.gpu_checkup import SMI_FIELDS, Gpu, Gpus, Xid, read_remapped, read_smi, read_xids

_SMI_S = 20.0  # a driver that initializes eight GPUs needs some seconds
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_LOG_RECORDS = 20_000
_LINKS = 18


def gpus() -> Gpus:
    on_bus = _on_bus()
    if not on_bus and not os.path.exists("/proc/driver/nvidia/version") and not _has_smi():
        return Gpus()
    found, problem, source = _ask_binding()
    if not found and not source:
        found, problem = _ask_smi()
        source = "nvidia-smi"
    xids, readable = _xids()
    return Gpus(found, on_bus, xids, readable, problem, source)


def _on_bus() -> int:
    root, count = "/sys/bus/pci/devices", 0
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if _line(f"{root}/{name}/vendor") == _NVIDIA and _line(f"{root}/{name}/class")[:6] in _DISPLAYS:
                count += 1
    return count


# --- the binding ---------------------------------------------------------------------------------------


def _ask_binding() -> tuple[tuple[Gpu, ...], str, str]:
    """Return the GPUs, the reason if there are none, and the name of the binding or "" if it is not installed."""
    nvml = binding()
    if nvml is None:
        return (), "", ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"the driver does not respond: {error}", "NVML"
    try:
        return tuple(_described(nvml, at) for at in range(nvml.nvmlDeviceGetCount())), "", "NVML"
    except nvml.NVMLError as error:
        return (), f"a GPU does not respond: {error}", "NVML"
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _described(nvml: Any, index: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)

    def told(question: str, *more: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, question)(device, *more)
        return None

    use = told("nvmlDeviceGetUtilizationRates")
    rows = told("nvmlDeviceGetRemappedRows")
    pending = told("nvmlDeviceGetRetiredPagesPendingStatus")
    links = [told("nvmlDeviceGetNvLinkState", link) for link in range(_LINKS)]
    known = [state for state in links if state is not None]
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetName(device)),
        _text(nvml.nvmlDeviceGetPciInfo(device).busId).lower(),
        memory.total,
        memory.used,
        None if use is None else use.gpu,
        told("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        told(
            "nvmlDeviceGetTotalEccErrors",
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        None if rows is None and pending is None else bool(pending) or bool(rows and rows[2]),
        None if rows is None else bool(rows[3]),
        sum(1 for state in known if state) if known else None,
        len(known) or None,
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# --- nvidia-smi ------------------------------------------------------------------------------------------


def _has_smi() -> bool:
    return any(
        os.access(os.path.join(folder, "nvidia-smi"), os.X_OK)
        for folder in os.environ.get("PATH", "").split(os.pathsep)
        if folder
    )


def _ask_smi() -> tuple[tuple[Gpu, ...], str]:
    text, problem = _smi(f"--query-gpu={','.join(SMI_FIELDS)}")
    found = read_smi(text)
    if not found:
        return (), problem or "nvidia-smi lists no GPU"
    # A driver may know only one of the two kinds of retirement; then one query for both would fail.
    rows, _ = _smi("--query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure")
    remapped = read_remapped(rows)
    return tuple(_with_rows(gpu, remapped.get(gpu.bus)) for gpu in found), ""


def _with_rows(gpu: Gpu, rows: tuple[bool, bool] | None) -> Gpu:
    if rows is None:
        return gpu
    return replace(gpu, reset_needed=bool(gpu.reset_needed) or rows[0], worn_out=rows[1])


def _smi(question: str) -> tuple[str, str]:
    command = ("nvidia-smi", question, "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SMI_S
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi did not answer within {_SMI_S:g} s"
    except OSError as error:
        return "", f"nvidia-smi cannot be run ({error.strerror})"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return "", f"nvidia-smi: {said[-1][:200] if said else f'exit code {done.returncode}'}"
    return done.stdout, ""


# --- the kernel's log --------------------------------------------------------------------------------------


def _xids(path: str = "/dev/kmsg") -> tuple[tuple[Xid, ...], bool]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return (), False
    records = []
    try:
        for _ in range(_LOG_RECORDS):
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:  # overwritten while we read: the next one is there
                continue
            except OSError:
                break
            if b"Xid" in record:
                records.append(record.decode(errors="replace"))
            elif not record:
                break
    finally:
        os.close(fd)
    return read_xids(records, time.clock_gettime(time.CLOCK_MONOTONIC)), True


def _line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""
