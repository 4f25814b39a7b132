"""Gathers the data of this node and runs the pre-flight checks: before a job, and as `ddp-launch doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import _ddp_launch_entry as doors
from launcher import error_boundary
from launcher.joining import addresses
from launcher.joining.connect import CannotConnect, ServiceConnection, open_session, open_session_of
from launcher.machine import gpu_reading
from launcher.machine.gpu_reading import names_in, read_all, read_layout, text_of
from launcher.machine.gpu_state import Gpu, GpuName, Layout, in_words, visible_indexes
from launcher.machine.kernel_log import PATH as KERNEL_LOG
from launcher.machine.kernel_log import logged_xids
from launcher.output.lines import is_colored
from launcher.output.log_file import temporary_roots
from launcher.preflight import checkup, installed
from launcher.preflight.checkup import (
    KB,
    MB,
    Check,
    Clock,
    Comparison,
    Gpus,
    Grade,
    Interface,
    Memory,
    Network,
    ProcessLimits,
    Report,
    SharedMemory,
    Storage,
    exit_code,
    skipped,
)
from launcher.settings.arguments import UsageError
from launcher.settings.assemble import HostEnvironment, assemble
from launcher.settings.config import Settings, unknown_variables
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.sources import HealthSource, SourceFailed
from launcher.stop_requests import unless_stopped
from launcher.template import cgroup
from launcher.template.import_variables import too_old
from rendezvous.values.contracts import CANNOT_RUN, INVALID_USAGE
from rendezvous.values.error_codes import Code, with_code
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    Part = Callable[[], tuple[Check, ...]]

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent
    from rendezvous.values.events import AgentJoined
    from rendezvous.values.types import NodeFacts

# --- the data of this node -------------------------------------------------------------------------
#
# Gathers and evaluates the data of this node.

# --- the machine -----------------------------------------------------------------------------------
#
# Memory, limits, name, interface and disks of this machine, as the kernel reports them. No part needs root.

_SHM = "/dev/shm"
_SIOCGIFFLAGS, _SIOCGIFMTU, _IFF_UP = 0x8913, 0x8921, 0x1


# --- memory ------------------------------------------------------------------------------------------


def memory(root: str = "/") -> Memory:
    root = root.rstrip("/")
    told = cgroup.counts_in(f"{root}/proc/meminfo")
    limits = filter(None, map(cgroup.memory_limit, cgroup.upwards("memory", root)))
    limit, used = min(limits, key=lambda each: each[0] - each[1], default=(None, 0))
    total, free = (told.get(name, 0) * KB for name in ("MemTotal:", "MemAvailable:"))
    return Memory(total, free, limit, used)


def shared_memory() -> SharedMemory | None:
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def limits() -> ProcessLimits:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pins = bool(names_in("/sys/class/infiniband")) or os.path.exists("/proc/driver/nvidia/version")
    return ProcessLimits(
        -1 if files == resource.RLIM_INFINITY else files,
        -1 if locked == resource.RLIM_INFINITY else locked,
        pins,
    )


# --- network -----------------------------------------------------------------------------------------


def network(spec: LaunchSpec) -> Network:
    host = socket.gethostname()
    found = tuple(dict.fromkeys(address for _, address in addresses.addresses_of(host, 0)))
    return Network(
        host,
        found,
        _interface(spec),
        asked=bool(spec.interface or spec.local_addr),
        alone=spec.job.max_nodes == 1 or _is_here(spec),
    )


def _is_here(spec: LaunchSpec) -> bool:
    """Whether all nodes of the job run on this machine."""
    return not spec.has_ssh_control and addresses.is_loopback(spec.rendezvous.rpartition(":")[0])


def _interface(spec: LaunchSpec) -> Interface | None:
    """The interface of --interface, otherwise the interface of the default route."""
    name = spec.interface
    if name:
        if name not in addresses.interfaces():
            return Interface(name, exists=False)
        return _described(name, addresses.address_of_interface(name))
    address = spec.local_addr or addresses.default_route_address()
    named = [
        each for each in addresses.interfaces() if address and addresses.address_of_interface(each) == address
    ]
    return _described(named[0], address) if named else None


def _described(name: str, address: str) -> Interface:
    speed = text_of(f"/sys/class/net/{name}/speed").strip()
    return Interface(
        name,
        address,
        _asked_of(name, _SIOCGIFMTU, "i"),
        bool(_asked_of(name, _SIOCGIFFLAGS, "H") & _IFF_UP)
        and text_of(f"/sys/class/net/{name}/carrier").strip() != "0",
        int(speed) if speed.isdecimal() else 0,
    )


def _asked_of(name: str, request: int, form: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            answer = fcntl.ioctl(asks, request, struct.pack("16s24x", name.encode()[:15]))
        except OSError:
            return 0
    return int(struct.unpack_from(form, answer, 16)[0])


# --- disks -------------------------------------------------------------------------------------------

_BLOCK = bytes(MB)


def storage(what: str, path: str, *, most_bytes: int, most_s: float, glimpse: bool) -> Storage:
    """Measure the write speed: write an unlinked file with fsync, up to a limit of time and size."""
    folder = _first_that_exists(path)
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return Storage(what, path, problem=_in_words(error))
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    if total:  # some file systems do not report it
        most_bytes = min(most_bytes, free // 4)
    try:
        speed = _write_speed(folder, most_bytes, most_s) if most_bytes >= MB else None
    except OSError as error:
        return Storage(what, path, total, free, problem=f"cannot be written to ({_in_words(error)})")
    return Storage(what, path, total, free, speed, glimpse=glimpse)


def _first_that_exists(path: str) -> str:
    """The folder or its nearest parent that exists: a check does not create folders."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _write_speed(folder: str, most_bytes: int, most_s: float) -> float:
    """Unlink the file before writing, so that no file is left, even if this process is killed."""
    fd, name = tempfile.mkstemp(prefix=".ddp-launch-", dir=folder)
    try:
        os.unlink(name)
        began, written = time.monotonic(), 0
        while written < most_bytes and time.monotonic() - began < most_s:
            written += os.write(fd, _BLOCK)
        os.fdatasync(fd)
        return written / max(1e-6, time.monotonic() - began)
    finally:
        os.close(fd)


def _in_words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


# --- all parts -------------------------------------------------------------------------------------
#
# Gathers and evaluates the data of this node: all parts in parallel, each with a time limit.

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
        *(checkup.judge_layout(layout, spec.numa_binding) if level != "off" else ()),
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
    yield "memory", lambda: (checkup.judge_memory(memory(), spec.nproc),)
    yield "/dev/shm", lambda: (checkup.judge_shared_memory(shared_memory()),)
    yield "limits", lambda: checkup.judge_limits(limits())
    for what, path in _paths(spec):
        yield f"{what} in {path}", partial(_stored, what, path, full)
    yield "network", lambda: checkup.judge_network(network(spec))
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
    found = storage(what, path, most_bytes=most_bytes, most_s=most_s, glimpse=not full)
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


def gpus(
    environ: Mapping[str, str], library: str = gpu_reading.LIBRARY, kernel_log: str = KERNEL_LOG
) -> Gpus:
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
        opened = gpu_reading.Nvml(library)
    except OSError:
        return Gpus()  # no driver
    except gpu_reading.NvmlError as error:
        version = installed.driver_version() if error.is_mismatch else ""
        module = f" (kernel module: {version})" if version else ""
        return Gpus(problem=f"the driver does not respond: {error}{module}", mismatch=error.is_mismatch)
    try:
        found = tuple(read_all(opened, index) for index in range(opened.count()))
        return Gpus(found, len(found), driver=opened.text("nvmlSystemGetDriverVersion"))
    finally:
        opened.close()


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


# --- before a job ----------------------------------------------------------------------------------
#
# Runs the pre-flight checks: before a job, and as `ddp-launch doctor`.

# --- before a job ----------------------------------------------------------------------------------
#
# The pre-flight checks of an agent: they start with the agent, and end before it joins.

_SUFFIX = ".preflight"  # of the separate job of a comparison
_CLOCK_S = 3.0
_NOTE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class HealthData:
    """The health data of the node that is sent with the join message."""

    healthy: bool
    note: str
    versions: str
    block: str = ""
    hardware: str = ""

    def of(self, facts: NodeFacts) -> NodeFacts:
        return replace(
            facts,
            healthy=self.healthy,
            health_note=self.note,
            versions=self.versions,
            block=self.block,
            hardware=self.hardware,
        )


class Preflight:
    """Must be created inside a running event loop. `say` receives lines for the user."""

    def __init__(self, spec: LaunchSpec, say: Callable[[str], None], boundary: ErrorBoundary) -> None:
        self._spec, self._say, self._boundary = spec, say, boundary
        self._gathering = asyncio.create_task(gather(spec, spec.preflight))

    async def checked(
        self, join: AgentJoined, connection: ServiceConnection, events: asyncio.Queue[AgentEvent]
    ) -> AgentJoined:
        """Add the results to the join message. A signal that stops the job cancels the checks.

        Raises `CannotConnect`.
        """
        concluding = self._boundary.awaited("the pre-flight check", self._concluded(connection), None)
        found = await unless_stopped(concluding, events)
        if isinstance(found, CannotConnect):
            raise found
        return replace(join, facts=found.of(join.facts)) if isinstance(found, HealthData) else join

    async def _concluded(self, connection: ServiceConnection) -> HealthData | CannotConnect:
        try:
            return await self.conclude(connection)
        except CannotConnect as failed:
            return failed

    async def conclude(self, connection: ServiceConnection) -> HealthData:
        """Raises `CannotConnect` if the machine fails the checks and the job has only this machine."""
        report, clock = await asyncio.gather(self._gathering, clock_checks(connection))
        report = report.plus(clock)
        if self._spec.preflight == "full" and self._spec.job.max_nodes > 1:
            report = report.plus(await self._compare_nodes(connection, report))
        for line in terminal_lines(report.checks):
            self._say(f"pre-flight: {line}")
        failed = checkup.failures(_conditions(report.checks, self._spec.preflight))
        if failed and self._spec.job.max_nodes == 1:
            named = f"this machine failed its pre-flight check: {failed}"
            raise CannotConnect(f"{named}. {_what_next(report)}", CANNOT_RUN, code=Code.PREFLIGHT_FAILED)
        had = str(report.versions)
        return HealthData(not failed, failed[:_NOTE_CHARS], had, report.block, report.hardware[:_NOTE_CHARS])

    async def _compare_nodes(self, connection: ServiceConnection, report: Report) -> tuple[Check, ...]:
        compare = doors.find(doors.NODE_COMPARISON, "links")
        spec = self._spec.named(self._spec.job.job_id + _SUFFIX)
        other = await open_session_of(connection, spec)
        try:
            compared: Comparison = await compare(
                other, spec, report, mtu_of(spec), lambda what: self._say(f"pre-flight: {what}")
            )
            return compared.checks
        finally:
            await other.leave()


def _conditions(checks: Sequence[Check], level: str) -> tuple[Check, ...]:
    """Return the checks that keep ranks off this node: those that the user has asked for.

    A check that runs by itself can be wrong about a machine on which the job would run, so it only reports.
    """
    if level in ("quick", "full"):
        return tuple(checks)
    return tuple(check for check in checks if check.name.startswith(checkup.NAME))


def _what_next(report: Report) -> str:
    failed = [check for check in report.checks if check.grade is Grade.FAIL]
    if all(check.name.startswith(checkup.NAME) for check in failed):
        return "Repair the node, leave a finding out with --health-ignore NAME, or remove --health-source"
    return "Run `ddp-launch doctor` to see all checks, or use --preflight off to skip them"


def mtu_of(spec: LaunchSpec) -> int:
    there = network(spec).interface
    return 0 if there is None else there.mtu


async def clock_checks(connection: ServiceConnection) -> tuple[Check, ...]:
    if not connection.endpoints:
        return ()
    from rendezvous.client.remote_session import clock_offset

    try:
        found = await asyncio.wait_for(clock_offset(connection.endpoints[0], connection.options), _CLOCK_S)
    except TimeoutError:
        return (skipped("clock", f"not checked: the service did not answer within {_CLOCK_S:g} s"),)
    if found is None:
        return (skipped("clock", "not checked: the service does not report its time"),)
    return (checkup.judge_clock(Clock(*found)),)


def terminal_lines(checks: Sequence[Check]) -> list[str]:
    """Lines for the terminal: only warnings and failures."""
    return [
        f"{check.name}: {check.found}" + (f"; {check.advice}" if check.advice else "")
        for check in checks
        if check.grade in (Grade.WARN, Grade.FAIL)
    ]


# --- ddp-launch doctor -----------------------------------------------------------------------------
#
# `ddp-launch doctor`: runs only the pre-flight checks and shows all results.
#
# Exit codes: 0 if all checks passed, 1 with warnings, 2 if a check failed. For one node it needs no service and no
# network. With `--nnodes N`, start it on each node with the options of a job: it waits for the other nodes, and
# then all nodes measure their links.

_ENTRY = EntryPoint(EntryKind.PROGRAM, "doctor")
_TRIES = 20  # a service may remember this many earlier checks under the same name


def run(settings: Settings, words: tuple[str, ...], environ: Mapping[str, str], here: HostEnvironment) -> int:
    if words:
        raise UsageError(
            f"unexpected argument {words[0]!r}: doctor does not run a script. Use only options of ddp-launch.",
            code=Code.INVALID_COMMAND_LINE,
        )
    spec, warnings = assemble(settings, _ENTRY, here)
    if spec.preflight == "off":
        raise settings.of("preflight").wrong(
            "with this value, doctor has no checks to run", "use quick or full"
        )
    if not settings.of("preflight").given:
        spec = replace(spec, preflight="full")
    for warning in (*unknown_variables(environ), *warnings):
        _say(f"warning: {warning}")
    return error_boundary.run(_check(spec, bool(settings["json"])))


async def _check(spec: LaunchSpec, as_json: bool) -> int:
    report = await gather(spec, spec.preflight)
    if spec.job.max_nodes > 1:
        try:
            report = await _with_others(spec, report)
        except CannotConnect as error:
            _say(with_code(f"error: {error}", error.code))
            return INVALID_USAGE
    _show(_as_json(report) if as_json else _as_table(report, spec.log.color))
    return exit_code(report.checks)


async def _with_others(spec: LaunchSpec, report: Report) -> Report:
    compare = doors.find(doors.NODE_COMPARISON, "links")
    began = time.monotonic()
    checks: tuple[Check, ...] = ()
    for number in range(1, _TRIES):
        named = spec if number == 1 else spec.named(f"{spec.job.job_id}.{number}")
        connection = await open_session(named, f"{os.getpid()}-{time.time_ns():x}")
        try:
            report = replace(report, node=connection.host)
            clock = await clock_checks(connection) if number == 1 else ()
            if spec.preflight != "full":
                return report.plus(clock)
            report = report.plus(clock)
            compared = await compare(connection, named, report, mtu_of(spec), _say)
            checks = compared.checks
        finally:
            await connection.leave()
        if not compared.too_late:
            break
    return replace(report.plus(checks), took_s=report.took_s + time.monotonic() - began)


def _as_table(report: Report, when: str) -> str:
    try:
        width = os.get_terminal_size(1).columns
    except OSError:
        width = 100
    colored = is_colored(when, os.isatty(1), os.environ)
    return checkup.table(report, width=max(60, min(width, 120)), color=colored)


def _as_json(report: Report) -> str:
    return json.dumps(checkup.as_json(report), indent=2, ensure_ascii=False)


def _show(text: str) -> None:
    _write(1, text)


def _say(text: str) -> None:
    _write(2, f"ddp-launch: doctor: {text}")


def _write(fd: int, text: str) -> None:
    encoding = getattr(sys.stdout if fd == 1 else sys.stderr, "encoding", None) or "utf-8"
    left = f"{text}\n".encode(encoding, "replace")
    with contextlib.suppress(OSError):  # the reader has closed the pipe; the exit code shows the result
        while left:
            left = left[os.write(fd, left) :]
