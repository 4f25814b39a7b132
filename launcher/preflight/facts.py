"""Gathers and evaluates the data of this node: all parts in parallel, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from launcher.machine.layout import Layout, in_words
from launcher.machine.layout_reading import read_layout
from launcher.output.log_folder import temporary_roots
from launcher.preflight import (
    checkup,
    compiled_core,
    gpu_checkup,
    gpus,
    host,
    placement,
    source_checkup,
    versions,
)
from launcher.preflight.checkup import MB, Check, Grade, Report, skipped
from launcher.sources.source import Source, SourceFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from launcher.settings.spec import LaunchSpec

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
    block, problem = placement.place_of(spec.topology, os.environ, layout)
    found += [
        *(placement.judge_layout(layout, spec.numa_binding, os.environ) if level != "off" else ()),
        *placement.judge_place(spec.topology, block, problem),
    ]
    if full:
        found += await _self_test(spec)
    had = versions.versions(spec.python)
    took_s = time.monotonic() - began
    return Report(socket.gethostname(), level, tuple(found), had, took_s, block, in_words(layout))


async def _laid_out(spec: LaunchSpec, level: str) -> Layout:
    """Empty if the driver does not answer in time; the check of the GPUs reports that."""
    if level == "off" and spec.topology != placement.NVLINK:
        return Layout()
    with contextlib.suppress(Exception):
        return await asyncio.wait_for(asyncio.to_thread(read_layout), _SLOW_S)
    return Layout()


def _parts(spec: LaunchSpec, full: bool) -> Iterator[tuple[str, Part]]:
    wants_gpus = spec.nproc_asked == "gpu"
    yield "memory", lambda: (checkup.judge_memory(host.memory(), spec.nproc),)
    yield "/dev/shm", lambda: (checkup.judge_shared_memory(host.shared_memory()),)
    yield "limits", lambda: checkup.judge_limits(host.limits())
    for what, path in _paths(spec):
        yield f"{what} in {path}", partial(_stored, what, path, full)
    yield "network", lambda: checkup.judge_network(host.network(spec))
    yield "versions", lambda: (_versions(spec),)
    if full and not _has_other_python(spec):  # at the start of a job, the ranks report it
        yield "core", lambda: (checkup.judge_core(compiled_core.state()),)
    yield "GPUs", lambda: gpu_checkup.judge_gpus(gpus.gpus(os.environ), wanted=wants_gpus)


def _sources(spec: LaunchSpec) -> Iterator[tuple[str, Part]]:
    for place in spec.health_sources:
        source = Source(place, spec.health_ignored)
        yield source_checkup.name_of(place), partial(_asked, source)


def _asked(source: Source) -> tuple[Check, ...]:
    try:
        return (source_checkup.judge_source(source.place, source.ask(os.environ)),)
    except SourceFailed as error:
        return (source_checkup.judge_failure(source.place, str(error)),)


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
    return checkup.judge_versions(versions.versions(spec.python))


def _bound_of(name: str, full: bool) -> float:
    slow = name == "GPUs" or name.startswith(source_checkup.NAME)
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
    tests = [gpu_checkup.SelfTest(**each) for each in results["results"]]
    return tuple(gpu_checkup.judge_self_test(test, tests) for test in tests)
