"""Counts the ranks that this machine can run: one per GPU, or one per usable CPU if there is no GPU.

Reads from the drivers, not from torch. Every count respects the variable with which a user hides devices. Only torch
knows devices that an extension adds to it, such as npu: a process of its own asks torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import _ddp_launch_entry as doors
from launcher.machine import gpu_reading
from launcher.machine.gpu_reading import names_in, text_of
from launcher.template import cgroup


class NoDevices(Exception):
    """The message says which devices were not found."""


def count_ranks(value: str, environ: Mapping[str, str], root: str = "/", python: str = sys.executable) -> int:
    """Return the number of ranks for `value` of --nproc-per-node."""
    match value:
        case "auto":
            gpus = nvidia_gpus(environ, root) or amd_gpus(environ, root)
            if not gpus and (intel_gpus(environ, root) or may_have_extensions()):
                gpus = max(0, asked(value, environ, python))
            return gpus or usable_cpus(root)
        case "cpu":
            return usable_cpus(root)
        case "gpu":
            found = nvidia_gpus(environ, root) or amd_gpus(environ, root)
            return found or _none("GPU", "CUDA_VISIBLE_DEVICES", environ)
        case "xpu":
            return intel_gpus(environ, root) or _none("Intel GPU", "ZE_AFFINITY_MASK", environ)
        case _ if value.isdecimal():
            return int(value)
        case _:
            found = asked(value, environ, python) if may_have_extensions() else _UNKNOWN
            if found == _UNKNOWN:
                raise NoDevices(
                    f"torch has no device type {value!r}, and no installed extension of torch adds it"
                )
            return found or _none(f"device of type {value}", "", environ)


# --- devices that an extension adds to torch ---------------------------------------------------------

_UNKNOWN = -1
_ASK_S = 120.0
_ASK = f"""
import sys

try:
    import torch
except ModuleNotFoundError:
    print({_UNKNOWN})
    sys.exit()
word = sys.argv[1]
if word == "auto":
    devices = torch.accelerator
elif word == torch._C._get_privateuse1_backend_name() and hasattr(torch, word):
    devices = getattr(torch, word)
else:
    print({_UNKNOWN})
    sys.exit()
print(devices.device_count() if devices.is_available() else 0)
"""


def may_have_extensions() -> bool:
    """Whether some package may name itself to torch, which loads it at the end of its own import."""
    return doors.others_may_name("torch.backends")


def asked(word: str, environ: Mapping[str, str], python: str) -> int:
    """Return how many devices torch has; `_UNKNOWN` if it does not know the type."""
    import subprocess

    command = [python, "-c", _ASK, word]
    isolated = {**environ, "PYTHONSAFEPATH": "1"}  # a torch.py in this directory is not torch
    try:
        answer = subprocess.run(command, env=isolated, capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoDevices(f"torch could not be asked for its devices ({error})") from None
    last = (answer.stdout.strip().splitlines() or [""])[-1]
    if answer.returncode or not last.lstrip("-").isdecimal():
        why = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        raise NoDevices(f"torch could not be asked for its devices ({why})")
    return int(last)


# --- devices that drivers know -----------------------------------------------------------------------


def _none(kind: str, variable: str, environ: Mapping[str, str]) -> int:
    hidden = environ.get(variable)
    raise NoDevices(
        f"this node has no visible {kind}" + ("" if hidden is None else f" ({variable}={hidden!r})")
    )


def nvidia_gpus(environ: Mapping[str, str], root: str = "/") -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    drivers = _entries(os.path.join(root, "proc/driver/nvidia/gpus"))
    if root == "/" and os.path.exists("/proc/driver/nvidia/version"):
        drivers = _ask_nvml() or drivers
    return drivers if visible is None else visible_of(drivers, visible)


def visible_of(present: int, visible: str) -> int:
    """Like CUDA: the list ends at the first entry that is not a device; if an entry is repeated, the list is empty."""
    seen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        named = entry.startswith(("GPU-", "MIG-")) and present > 0
        if not named and not (entry.isdecimal() and len(entry) < 6 and int(entry) < present):
            break
        if entry in seen:
            return 0
        seen.append(entry)
    return len(seen)


def _ask_nvml() -> int:
    with gpu_reading.driver() as library:
        return library.count() if library is not None else 0


def amd_gpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Count the entries in the kernel's list of compute nodes; an entry with gpu_id 0 is a CPU."""
    nodes = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    ids = [text_of(os.path.join(nodes, name, "gpu_id")).strip() for name in names_in(nodes)]
    present = sum(1 for each in ids if each not in ("", "0"))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environ:
            present = visible_of(present, environ[variable])
    return present


def intel_gpus(environ: Mapping[str, str], root: str = "/") -> int:
    folder = os.path.join(root, "sys/class/drm")
    renders = [name for name in names_in(folder) if name.startswith("renderD")]
    vendors = [text_of(os.path.join(folder, name, "device/vendor")).strip() for name in renders]
    present = vendors.count("0x8086")
    mask = environ.get("ZE_AFFINITY_MASK")
    if mask is None:
        return present
    return min(
        present, len(dict.fromkeys(part.partition(".")[0] for part in mask.split(",") if part.strip()))
    )


def usable_cpus(root: str = "/") -> int:
    """The number of CPUs in the affinity mask of this process, limited by the CPU quota of its cgroups."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(root: str = "/") -> float | None:
    """The lowest CPU quota of our cgroup and its ancestors, in CPUs."""
    limits = map(cgroup.cpu_limit, cgroup.upwards("cpu", root.rstrip("/")))
    return min((limit for limit in limits if limit is not None), default=None)


def _entries(folder: str) -> int:
    return len(names_in(folder))
