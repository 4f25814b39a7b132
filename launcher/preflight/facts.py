"""Gathers and evaluates the data of this node: all parts in parallel, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import _ddp_launch_entry as doors
from launcher.machine import nvml
from launcher.machine.gpu_reading import read_all, read_layout
from launcher.machine.gpu_state import Gpu, GpuName, Layout, in_words, visible_indexes
from launcher.machine.kernel_log import PATH as KERNEL_LOG
from launcher.machine.kernel_log import logged_xids
from launcher.machine.small_files import text_of
from launcher.output.log_folder import temporary_roots
from launcher.preflight import checkup, host, installed
from launcher.preflight.checkup import MB, Check, Gpus, Grade, Report, skipped
from launcher.sources import SourceFailed
from launcher.template.torch_release import too_old

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from launcher.settings.spec import LaunchSpec
    from launcher.sources import HealthSource


if TYPE_CHECKING:
    Part = Callable[[], tuple[Check, ...]]

_PART_S = 3.0
_SLOW_S = 8.0  # a driver without persistence mode initializes its devices first; sources have their own limit
_FULL_PART_S = 20.0
_SLICES = 30  # intervals per time limit
_SELF_TEST_S = 90.0  # to import torch on a cold file system is most of it
_QUICK_BYTES, _QUICK_WRITE_S = 2 * MB, 0.05
_FULL_BYTES, _FULL_WRITE_S = 256 * MB, 1.0


async def gather(spec: LaunchSpec, level: str) -> Report:
    """Run all checks of `level`: report, quick or full; off: only the health sources that the user has named."""
    began = time.monotonic()
    full = level == "full"
    parts = [*(_parts(spec, full) if level != "off" else ()), *_sources(spec)]
    work = [_bounded(name, part, _bound_of(name, full)) for name, part in parts]
    laid_out = asyncio.ensure_future(_laid_out(spec, level))
    found = [check for checks in await asyncio.gather(*work) for check in checks]
    layout = await laid_out
    block, problem = checkup.place_of(spec.topology, os.environ, layout)
    found += [
        *(checkup.judge_layout(layout, spec.numa_binding, os.environ) if level != "off" else ()),
        *checkup.judge_place(spec.topology, block, problem),
    ]
    if full:
        found += await _self_test(spec)
    had = installed.versions(spec.python)
    took_s = time.monotonic() - began
    return Report(socket.gethostname(), level, tuple(found), had, took_s, block, in_words(layout))


async def _laid_out(spec: LaunchSpec, level: str) -> Layout:
    """Empty if the driver does not answer in time; the check of the GPUs reports that."""
    if level == "off" and spec.topology != checkup.NVLINK:
        return Layout()
    with contextlib.suppress(Exception):
        return await asyncio.wait_for(asyncio.to_thread(read_layout), _SLOW_S)
    return Layout()


def _parts(spec: LaunchSpec, full: bool) -> Iterator[tuple[str, Part]]:
    wants_gpus = spec.job.nproc == "gpu"
    yield "memory", lambda: (checkup.judge_memory(host.memory(), spec.nproc),)
    yield "/dev/shm", lambda: (checkup.judge_shared_memory(host.shared_memory()),)
    yield "limits", lambda: checkup.judge_limits(host.limits())
    for what, path in _paths(spec):
        yield f"{what} in {path}", partial(_stored, what, path, full)
    yield "network", lambda: checkup.judge_network(host.network(spec))
    yield "versions", lambda: (_versions(spec),)
    if full and not _has_other_python(spec):  # at the start of a job, the ranks report it
        yield "core", lambda: (checkup.judge_core(installed.state()),)
    yield "GPUs", lambda: checkup.judge_gpus(gpus(os.environ), wanted=wants_gpus)


def _sources(spec: LaunchSpec) -> Iterator[tuple[str, Part]]:
    for place in spec.health_sources:
        source = doors.find(doors.HEALTH_SOURCE, "any")(place, spec.health_ignored)
        yield checkup.name_of(place), partial(_asked, source)


def _asked(source: HealthSource) -> tuple[Check, ...]:
    try:
        return (checkup.judge_source(source.place, source.ask(os.environ)),)
    except SourceFailed as error:
        return (checkup.judge_failure(source.place, str(error)),)


def _stored(what: str, path: str, full: bool) -> tuple[Check, ...]:
    most_bytes, most_s = (_FULL_BYTES, _FULL_WRITE_S) if full else (_QUICK_BYTES, _QUICK_WRITE_S)
    found = host.storage(what, path, most_bytes=most_bytes, most_s=most_s, glimpse=not full)
    return (checkup.judge_storage(found),)


def _paths(spec: LaunchSpec) -> Iterator[tuple[str, str]]:
    yield "logs", os.path.abspath(spec.log.directory) if spec.log.directory else temporary_roots()[0]
    for path in spec.preflight_paths:
        yield "checkpoints", os.path.abspath(path)


def _has_other_python(spec: LaunchSpec) -> bool:
    return bool(spec.python) and os.path.realpath(spec.python) != os.path.realpath(sys.executable)


def _versions(spec: LaunchSpec) -> Check:
    if _has_other_python(spec):
        return skipped("versions", f"not checked: the ranks use another Python ({spec.python})")
    had = installed.versions(spec.python)
    return checkup.judge_versions(had, too_old(had.torch))


def _bound_of(name: str, full: bool) -> float:
    slow = name == "GPUs" or name.startswith(checkup.NAME)
    return _FULL_PART_S if full else _SLOW_S if slow else _PART_S


async def _bounded(name: str, part: Part, within_s: float) -> tuple[Check, ...]:
    """Wait in short intervals, so that time in which this process was suspended does not count."""
    looking = asyncio.ensure_future(asyncio.to_thread(part))
    try:
        for _ in range(_SLICES):
            if (await asyncio.wait((looking,), timeout=within_s / _SLICES))[0]:
                return looking.result()
        return (checkup.overdue(name, within_s),)
    except Exception as error:  # a failed check is reported, and does not prevent the start
        return (skipped(name, f"could not be checked ({type(error).__name__}: {error})"),)
    finally:
        looking.cancel()


# --- load test ---------------------------------------------------------------------------------------------


async def _self_test(spec: LaunchSpec) -> tuple[Check, ...]:
    program = os.path.join(os.path.dirname(__file__), "self_test.py")
    command = (spec.python or sys.executable, "-P", program)
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return (skipped("load test", f"{command[0]} cannot be started ({error.strerror})"),)
    try:
        out, err = await asyncio.wait_for(child.communicate(), _SELF_TEST_S)
    except TimeoutError:
        found = f"no result within {_SELF_TEST_S:g} s"
        return (Check("load test", Grade.FAIL, found, advice="check for a device or a driver that hangs"),)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    return _read_self_test(out, err, child.returncode or 0)


def _read_self_test(out: bytes, err: bytes, returncode: int) -> tuple[Check, ...]:
    try:
        results = json.loads(out)
    except ValueError:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or [""]
        found = f"the load test ended with exit code {returncode}: {last[0][:300]}"
        return (
            Check(
                "load test",
                Grade.FAIL,
                found,
                advice="run python -c 'import torch; torch.ones(1, device=0)' to see the error",
            ),
        )
    if "problem" in results:
        return (skipped("load test", results["problem"]),)
    tests = [checkup.SelfTest(**each) for each in results["results"]]
    return tuple(checkup.judge_self_test(test, tests) for test in tests)


# --- gathers the data of GPUs for their checks: from NVML, the PCIe bus and the kernel log ----------

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
