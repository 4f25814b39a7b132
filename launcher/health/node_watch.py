"""Watches the node's health and the ranks' phase times while ranks run, and reports them.

Changes of the node's health go to the terminal and to the service. Phase times go to the service once per window.
`--health-port` serves both over HTTP: /livez (the agent's loop answers, and no rank has stalled), /readyz (the ranks
run) and /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import _ddp_launch_entry as doors
from launcher import error_boundary
from launcher.exchange import AgentPhase, RankEnded, Supervision
from launcher.health import exposition, node_health, stall_detection
from launcher.health.exposition import PARTS, OverTime
from launcher.health.node_health import Disk, HealthState, MemoryUse, Nic, NodeReading, Throttling
from launcher.health.page import phase_times
from launcher.health.watcher import RankWatcher
from launcher.machine import gpu_reading as nvml_calls
from launcher.machine.gpu_reading import Nvml, read, text_of
from launcher.machine.gpu_state import Gpu, GpuName, visible_indexes
from launcher.machine.kernel_log import PATH as KERNEL_LOG
from launcher.machine.kernel_log import KernelLog
from launcher.machine.xids import Xid, short_bus
from launcher.output.lines import printable
from launcher.settings.spec import LaunchSpec, timer_file
from launcher.sources import HealthSource, Opinion, SourceFailed
from launcher.template import cgroup, scratch, tree
from launcher.template.contracts import EXCLUDE_NODE
from launcher.template.tree import process_stat
from rendezvous.service.web import Web
from rendezvous.values.cause_text import signal_name
from rendezvous.values.events import FromAgent, NodeHealth, PhaseTimesReported
from rendezvous.values.rank_view import BINS, Histogram
from rendezvous.values.types import StragglerPolicy, StragglerRule

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.health.hang_watch import HangWatch
    from launcher.health.pages import Pages
    from rendezvous.values.rank_time import RankTime


_SAMPLE_S = 5.0
_UNFIT_CHARS = 1000
_REQUESTS_S = 1.0


class PhaseTimesWatch(RankWatcher):
    what = "reporting the phase times of the ranks"

    def __init__(
        self,
        stragglers: StragglerRule,
        pages: Pages,
        send: Callable[[FromAgent], None],
        state: Callable[[], Supervision],
        boundary: ErrorBoundary,
    ) -> None:
        super().__init__(boundary)
        self._stragglers, self._pages, self._send, self._state = stragglers, pages, send, state

    def pause_s(self) -> float:
        return 0.0 if self._stragglers.policy is StragglerPolicy.OFF else self._stragglers.window_s

    def look(self) -> None:
        now = self._state()
        if now.phase is not AgentPhase.DONE and now.generation == self._generation:
            self._send(PhaseTimesReported(now.agent, now.generation, phase_times(self._pages.views())))


class Requests(RankWatcher):
    """Looks whether a rank has asked for something. The end of a rank looks at once (`with_node_problems`)."""

    what = "reading what the ranks ask for"

    def __init__(self, node: NodeWatch, boundary: ErrorBoundary) -> None:
        super().__init__(boundary)
        self._node = node

    def pause_s(self) -> float:
        return _REQUESTS_S

    def look(self) -> None:
        self._node.read_requests()


class NodeWatch:
    def __init__(
        self,
        spec: LaunchSpec,
        folder: str,
        scratch: str,
        pages: Pages,
        hangs: HangWatch,
        say: Callable[[str], None],
        send: Callable[[FromAgent], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._boundary = boundary
        self._spec, self._pages, self._hangs, self._say, self._send = spec, pages, hangs, say, send
        self._loop = asyncio.get_running_loop()
        self._health = HealthState()
        self._state: Callable[[], Supervision] | None = None
        self.on_news: Callable[[str], None] = lambda _text: None
        self.on_gpus: Callable[[], None] = lambda: None  # when their memory is known
        self.on_use: Callable[[Mapping[str, float]], None] = lambda _use: None  # after each sample
        self.rank_times: Callable[[], Sequence[RankTime]] = tuple
        self.logged: Callable[[], Sequence[tuple[int, str, float]]] = (
            tuple  # by the scripts: rank, name, number
        )
        self.lowest_gpu_memory: dict[int, int] = {}  # bytes in use, by GPU: what does not belong to the ranks
        self._restarts = {part: Histogram((0,) * BINS) for part in ("all", *PARTS)}
        sources = [
            doors.find(doors.HEALTH_SOURCE, "any")(place, spec.health_ignored)
            for place in spec.health_sources
        ]
        self._poll = Poll(sources, os.environ)
        self._sampler = Sampler(partial(Node, [folder], self._poll), self._from_thread, _SAMPLE_S, boundary)
        self._web: Web | None = None
        self._scratch = scratch
        self._rank_timers: RankTimers | None = None
        self._expired: dict[int, str] = {}  # by rank: the message of its expired timer

    async def begin(self, state: Callable[[], Supervision]) -> None:
        """Start to watch: the agent has joined."""
        self._state = state
        self._poll.start()
        self._sampler.start()
        if self._spec.rank_timers:
            self._start_timers(timer_file(self._scratch, os.environ))
        if self._spec.health_address is not None:
            await self._serve(*self._spec.health_address)

    async def _serve(self, host: str, port: int) -> None:
        web = Web(self._is_ready, self._metrics, self._is_alive)
        try:
            port = await web.listen(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            return self._say_to_user(
                f"--health-port {host}:{port}: cannot listen: {reason}; the job continues without this port"
            )
        self._web = web
        self._say_to_user(f"node health: http://{host}:{port}/livez, /readyz and /metrics")

    async def end(self) -> None:
        self._sampler.close()
        self._poll.close()
        if self._rank_timers is not None:
            self._rank_timers.close()
        if self._web is not None:
            await self._web.close()

    def _say_to_user(self, text: str) -> None:
        self._say(f"ddp-launch: {text}")

    # --- the node ----------------------------------------------------------------------------------

    def _from_thread(self, reading: NodeReading) -> None:
        report = partial(
            self._boundary.called,
            "evaluating the health of the node",
            partial(self._on_reading, reading),
            None,
        )
        error_boundary.call_in(self._loop, report)

    def _on_reading(self, reading: NodeReading) -> None:
        before = self._health
        if reading.gpus and not self.lowest_gpu_memory:
            self.on_gpus()
        for gpu in reading.gpus:
            known = self.lowest_gpu_memory.get(gpu.index, gpu.memory_used)
            self.lowest_gpu_memory[gpu.index] = min(known, gpu.memory_used)
        self._health, news = node_health.evaluate(before, reading)
        self._sampler.pause_s = node_health.next_sample_s(self._health, _SAMPLE_S)
        for text in news:
            self._say_to_user(f"{self.state_now.agent.node}: {text}")
            self._send(self._health_news(text))
            self.on_news(text)
        if not news and self._health.texts != before.texts:  # an event is no longer in the list
            self._send(self._health_news(""))
        self.on_use(self._health.use)

    @property
    def use(self) -> Mapping[str, float]:
        return self._health.use

    def _health_news(self, news: str) -> NodeHealth:
        unfit = self._health.unfit[:_UNFIT_CHARS]
        return NodeHealth(self.state_now.agent, news, self._health.texts, unfit)

    def read_requests(self) -> None:
        """Pass on that a rank asks to leave this node out (`ddp.exclude_node`)."""
        path = f"{self._scratch}/{EXCLUDE_NODE}"
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = printable(file.read(_UNFIT_CHARS))
        except FileNotFoundError:
            return
        os.unlink(path)
        self.ask_to_leave(EXCLUDE_NODE, text)

    def ask_to_leave(self, key: str, text: str) -> None:
        """Ask the service to leave this node out, for as long as this agent runs."""
        problem = node_health.HealthProblem(text, self._loop.time(), unfit=True)
        self._health = replace(self._health, complaints={**self._health.complaints, key: problem})
        self._say_to_user(f"{self.state_now.agent.node}: {text}")
        self._send(replace(self._health_news(text), is_asked=True))
        self.on_news(text)

    def with_node_problems(self, ended: RankEnded) -> RankEnded:
        """Add the problems of the node before the failure to the hint."""
        self.read_requests()
        if ended.cause is None:
            return ended
        expired = self._expired.pop(ended.cause.rank, "")
        seen = node_health.before_end(self._health, self._loop.time())
        hint = "; ".join(filter(None, (expired or ended.cause.hint, seen)))
        return replace(ended, cause=replace(ended.cause, hint=hint))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """As of the last reading."""
        return () if self._health.last is None else self._health.last.gpus

    # --- its ranks ---------------------------------------------------------------------------------

    def _start_timers(self, path: str) -> None:
        try:
            self._rank_timers = RankTimers(path, self._timer_expired, self._pages.pids)
        except OSError as error:
            self._say_to_user(
                f"--rank-timers: cannot create the pipe {path}: {error.strerror}; the job continues without rank timers"
            )

    def _timer_expired(self, timer: Timer) -> None:
        rank = next((view.rank for view in self._pages.views() if view.pid == timer.pid), None)
        if rank is not None and timer.signum:
            self._expired[rank] = timer.in_words
        self._say_to_user(f"{f'process {timer.pid}' if rank is None else f'rank {rank}'}: {timer.in_words}")

    def ranks_started(self) -> None:
        self._expired.clear()
        if texts := self._health.texts:  # the service discards the health of a node that leaves
            self._send(self._health_news("; ".join(texts)))

    # --- HTTP ------------------------------------------------------------------------------

    @property
    def state_now(self) -> Supervision:
        assert self._state is not None, "begin() must be called first"
        return self._state()

    def _is_ready(self) -> bool:
        return self.state_now.phase is AgentPhase.RUNNING and bool(self.state_now.live)

    def _is_alive(self) -> bool:
        return self.state_now.phase is not AgentPhase.RUNNING or not stall_detection.is_overdue(
            self._hangs.reports()
        )

    def _metrics(self) -> str:
        state = self.state_now
        restarts = state.assignment.restart_count if state.assignment is not None else 0
        names = (self._spec.job.job_id, state.agent.node)
        now = (max(0, state.generation), restarts, len(state.live), self._is_ready())
        running = exposition.Running(*now, *names)
        over_time = OverTime(self.rank_times(), self._restarts, self.logged())
        return exposition.text(running, self._pages.views(), self._health, over_time)

    def restarted(self, parts_s: Mapping[str, float]) -> None:
        """The ranks of this node have finished their first step after a restart, which took so long part by part."""
        for part, seconds in (*parts_s.items(), ("all", sum(parts_s.values()))):
            self._restarts[part] = self._restarts[part].plus(seconds)


# --- samples of the node ---------------------------------------------------------------------------
#
# Samples the state of this node periodically, in its own thread. A dead file server or a hanging driver can block
# this thread, but not the agent.
#
# It reads the memory and CPU cgroups (either version) and their ancestors, /proc/meminfo, memory pressure if the
# kernel reports it, swapping, network interfaces and InfiniBand ports, free space, and GPUs through NVML. Whatever
# cannot be read is omitted.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Interfaces that the host creates itself: their drops do not describe the network.
_NOT_NETWORK = (
    *("lo", "veth", "docker", "br-", "virbr", "cni", "cali", "flannel", "lxc", "ifb", "dummy", "tap", "tun"),
    "bonding_masters",
)
_IB_DATA = ("port_rcv_data", "port_xmit_data")  # in words of four bytes
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device has
_IB_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors")


class Node:
    """The sources of one node. `root` is put before /proc and /sys (for tests)."""

    def __init__(self, disks: Sequence[str] = (), poll: Poll | None = None, *, root: str = "") -> None:
        self._root, self._disks, self._poll = root, tuple(disks), poll
        self._memory_folders = cgroup.upwards("memory", root)
        self._cpu_folders = cgroup.upwards("cpu", root)
        self._gpus = open_gpus()

    def read(self) -> NodeReading:
        return NodeReading(
            at=time.monotonic(),
            memory=max(self._memories(), key=lambda memory: memory.share, default=None),
            stalled=self._stalled(),
            swapped=self._swapped(),
            throttling=self._throttling(),
            cpu=self._cpu(),
            disk=self._disk_bytes(),
            nics=(*self._nics(), *self._ports()),
            gpus=self._gpus.read() if self._gpus is not None else (),
            disks=tuple(_disks(self._disks)),
            outside=self._poll.latest if self._poll is not None else (),
        )

    # --- memory --------------------------------------------------------------------------------------

    def _memories(self) -> Iterator[MemoryUse]:
        machine = cgroup.counts_in(f"{self._root}/proc/meminfo")
        total = machine.get("MemTotal:", 0) << 10
        kills = 0
        for folder in self._memory_folders:
            memory = _of_cgroup(folder, total)
            if memory is not None:
                kills = max(kills, memory.oom_kills)
                yield memory
        if total:
            used = total - (machine.get("MemAvailable:", 0) << 10)
            yield MemoryUse("the machine's memory", used, total, kills)

    def _stalled(self) -> float:
        for folder in (*self._memory_folders, f"{self._root}/proc/pressure"):
            name = "memory" if folder.endswith("/pressure") else "memory.pressure"
            for line in text_of(f"{folder}/{name}").splitlines():
                if line.startswith("full "):
                    return float(line.split()[1].partition("=")[2])
        return 0.0

    def _swapped(self) -> int:
        counts = cgroup.counts_in(f"{self._root}/proc/vmstat")
        return (counts.get("pswpin", 0) + counts.get("pswpout", 0)) * _PAGE_BYTES

    # --- CPU -----------------------------------------------------------------------------------------

    def _throttling(self) -> Throttling | None:
        for folder in self._cpu_folders:
            if (cpus := cgroup.cpu_limit(folder)) is None:
                continue
            counts = cgroup.counts_in(f"{folder}/cpu.stat")
            used_s = counts.get("usage_usec", 0) / 1e6
            return Throttling(counts.get("nr_periods", 0), counts.get("nr_throttled", 0), cpus, used_s)
        return None

    def _cpu(self) -> tuple[int, int]:
        words = text_of(f"{self._root}/proc/stat").partition("\n")[0].split()[1:9]
        times = [int(word) for word in words if word.isdecimal()]
        idle = sum(times[3:5])  # and waiting for a disk
        return sum(times) - idle, sum(times)

    def _disk_bytes(self) -> tuple[int, int]:
        """Of whole devices that are not made of others."""
        sectors = [0, 0]
        for line in text_of(f"{self._root}/proc/diskstats").splitlines():
            words = line.split()
            if len(words) < 10 or words[2].startswith(_NOT_DISKS):
                continue
            if os.path.exists(f"{self._root}/sys/block/{words[2]}"):  # not a partition
                sectors[0] += int(words[5])
                sectors[1] += int(words[9])
        return _SECTOR_BYTES * sectors[0], _SECTOR_BYTES * sectors[1]

    # --- network -------------------------------------------------------------------------------------

    def _nics(self) -> Iterator[Nic]:
        for line in text_of(f"{self._root}/proc/net/dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            name, counts = name.strip(), numbers.split()
            if not name.startswith(_NOT_NETWORK) and len(counts) >= 12:
                carrier = text_of(f"{self._root}/sys/class/net/{name}/carrier").strip() == "1"
                errors, drops = int(counts[2]) + int(counts[10]), int(counts[3]) + int(counts[11])
                yield Nic(name, errors, drops, carrier, int(counts[0]), int(counts[8]))

    def _ports(self) -> Iterator[Nic]:
        infiniband = f"{self._root}/sys/class/infiniband"
        with suppress(OSError):
            for device in sorted(os.listdir(infiniband)):
                for port in sorted(os.listdir(f"{infiniband}/{device}/ports")):
                    place = f"{infiniband}/{device}/ports/{port}"
                    errors = [text_of(f"{place}/counters/{each}").strip() for each in _IB_ERRORS]
                    total = sum(int(each) for each in errors if each.isdecimal())
                    up = text_of(f"{place}/state").startswith("4:")
                    data = [text_of(f"{place}/counters/{each}").strip() for each in _IB_DATA]
                    words = [4 * int(each) if each.isdecimal() else 0 for each in data]
                    yield Nic(f"{device}/{port}", total, 0, up, *words)


def _of_cgroup(folder: str, machine: int) -> MemoryUse | None:
    """Return None if the cgroup has no limit below the machine's memory."""
    found = cgroup.memory_limit(folder)
    if found is None or found[0] >= machine:
        return None
    files = ("memory.events", "memory.oom_control")
    kills = max(cgroup.counts_in(f"{folder}/{name}").get("oom_kill", 0) for name in files)
    return MemoryUse("the cgroup's limit", found[1], found[0], kills)


def _disks(paths: Sequence[str]) -> Iterator[Disk]:
    for path in paths:
        with suppress(OSError):
            found = os.statvfs(path)
            yield Disk(path, found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


class Sampler:
    """Calls `report` in its own thread after each sample. `pause_s` is the time between samples."""

    def __init__(
        self,
        node: Callable[[], Node],
        report: Callable[[NodeReading], None],
        pause_s: float,
        boundary: ErrorBoundary,
    ) -> None:
        self.pause_s = pause_s
        self._node, self._report, self._boundary = node, report, boundary
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread without waiting: it may be blocked in a read."""
        self._over.set()

    def _run(self) -> None:
        node = self._boundary.called("reading the state of the node", self._node, None)
        while node is not None and not self._over.is_set():
            reading = self._boundary.called("reading the state of the node", node.read, None)
            if reading is not None and not self._over.is_set():
                self._report(reading)
            self._over.wait(self.pause_s)


# --- GPUs ------------------------------------------------------------------------------------------
#
# Reads the GPUs of this node for each sample, with NVML; without a driver there is no GPU data.
#
# Xid errors come from the kernel log if it is readable, because its lines also name the program. Otherwise NVML
# delivers their numbers as events.

_MOST_XIDS = 16
_XID_EVENT = 0x8
_EVENT = struct.Struct("@PQQII")  # device, type, data, and which part of a divided GPU


def open_gpus(
    library: str = nvml_calls.LIBRARY, kernel_log: str = KERNEL_LOG, environ: Mapping[str, str] | None = None
) -> GpuReader | None:
    """The GPUs that CUDA_VISIBLE_DEVICES of `environ` (default: of this process) selects."""
    try:
        visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
        return GpuReader(nvml_calls.Nvml(library), kernel_log, visible)
    except (OSError, nvml_calls.NvmlError):  # no driver, or it does not respond
        return None


class GpuReader:
    def __init__(self, nvml: Nvml, kernel_log: str, visible: str | None) -> None:
        self._nvml = nvml
        handles = [nvml.handle("nvmlDeviceGetHandleByIndex_v2", index) for index in range(nvml.count())]
        known = [GpuName("", () if each is None else nvml_calls.uuids_of(nvml, each)) for each in handles]
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
        return events if nvml_calls.OK in watched else None

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

        return nvml_calls.address_of(self._nvml, ctypes.c_void_p(device)) or "0000:00:00.0"


def _of_gpu(gpu: Gpu, xids: tuple[Xid, ...]) -> tuple[Xid, ...]:
    return tuple(xid for xid in xids if gpu.bus and xid.bus == short_bus(gpu.bus))


# --- times and limits of ranks ---------------------------------------------------------------------
#
# `torch.distributed.elastic.timer`: a rank sets a timer for an operation; the agent kills it if the timer expires.
#
# The protocol is torchrun's: a named pipe, into which a rank writes a line of JSON for each timer that begins or
# ends. Unlike torchrun's agent, this agent does not end itself together with the rank. The rank has failed, and the
# usual failure handling follows.
#
# The agent opens a pidfd at the first timer of a process, so that it never signals a different process with a reused
# PID. The process must be below the zygote, because a PID from inside a container can belong to another process on
# the host. A timer wakes the agent once, when it expires.

_READ = 1 << 16  # a line is at most PIPE_BUF: 4096
_LONGEST_S = 1e9
_LOOK_AGAIN_S, _LOOKS = 0.25, 20


class Timer(NamedTuple):
    pid: int
    scope: str  # the timer's name
    ends_at: float  # wall-clock time; below 0: the timer has ended
    signum: int  # 0: report only, without a signal

    @property
    def in_words(self) -> str:
        action = f"; its process got {signal_name(self.signum)}" if self.signum else ""
        return f'timer "{printable(self.scope)}" (torch.distributed.elastic.timer) expired{action}'


def parse_line(line: bytes) -> Timer | None:
    """Return None if the line does not have the format of torch's timer client."""
    try:
        content = json.loads(line)
        pid, ends_at, asked = int(content["pid"]), float(content["expiration_time"]), int(content["signal"])
        signum = signal.Signals(asked) if asked > 0 else 0
        return Timer(pid, str(content["scope_id"]), ends_at, signum) if pid > 0 else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


@dataclass(slots=True)
class _Process:
    fd: int
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)


class RankTimers:
    """The timers of this node's ranks. `expired` receives each expired timer before its process gets a signal.

    `rank_pids` returns the processes of the ranks that live.
    """

    def __init__(
        self, path: str, expired: Callable[[Timer], None], rank_pids: Callable[[], Iterable[int]]
    ) -> None:
        """Raise `OSError` if the pipe cannot be created. An existing pipe is from an earlier run and is replaced."""
        self._path, self._expired, self._rank_pids = path, expired, rank_pids
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _Process] = {}
        self._unknown: dict[
            tuple[int, str], asyncio.TimerHandle
        ] = {}  # timers of processes that may be found later
        scratch.ensure(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.lstat(path).st_mode):
                os.unlink(path)
        os.mkfifo(path, 0o600)
        # The agent also opens the pipe for writing, so that it never reaches the end of the stream.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self._loop.add_reader(self._fd, self._listen)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        for pid in list(self._processes):
            self._forget(pid)
        for waiting in self._unknown.values():
            waiting.cancel()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _listen(self) -> None:
        *lines, rest = (self._rest + os.read(self._fd, _READ)).split(b"\n")
        self._rest = rest[-_READ:]
        for line in lines:
            timer = parse_line(line)
            if timer is not None:
                self._note(timer)

    def _note(self, timer: Timer, looks: int = _LOOKS) -> None:
        process = self._processes.get(timer.pid)
        if process is not None and (begun := process.timers.pop(timer.scope, None)):
            begun.cancel()
        if (waiting := self._unknown.pop((timer.pid, timer.scope), None)) is not None:
            waiting.cancel()
        if timer.ends_at < 0:
            return
        if process is not None or self._watch_process(timer.pid):
            self._begin(timer)
        elif looks:  # the pipe may be faster than the zygote's report that a rank has started
            again = self._loop.call_later(_LOOK_AGAIN_S, self._note, timer, looks - 1)
            self._unknown[timer.pid, timer.scope] = again

    def _watch_process(self, pid: int) -> bool:
        # Their parent is the zygote. It need not be a child of this process: see `launcher.warm_pool`.
        stats = [process_stat(each) for each in self._rank_pids()]
        roots = {os.getpid(), *(stat.parent for stat in stats if stat is not None)}
        if all(pid not in tree.descendants(root) for root in roots):
            return False
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False  # the process has ended
        self._processes[pid] = _Process(fd)
        self._loop.add_reader(fd, self._forget, pid)  # called when it ends
        return True

    def _begin(self, timer: Timer) -> None:
        in_s = min(max(0.0, timer.ends_at - time.time()), _LONGEST_S)
        handle = self._loop.call_later(in_s, self._expire, timer)
        self._processes[timer.pid].timers[timer.scope] = handle

    def _expire(self, timer: Timer) -> None:
        process = self._processes[timer.pid]
        del process.timers[timer.scope]
        self._expired(timer)
        if timer.signum:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process.fd, timer.signum)

    def _forget(self, pid: int) -> None:
        process = self._processes.pop(pid)
        self._loop.remove_reader(process.fd)
        os.close(process.fd)
        for handle in process.timers.values():
            handle.cancel()


# --- health sources ---------------------------------------------------------------------------------
#
# Asks the health sources at intervals, in a thread of its own: a source that hangs delays nothing else.

_SOURCES_EVERY_S = 30.0


class Poll:
    """`latest` is replaced as a whole, so that it can be read from another thread."""

    def __init__(
        self, sources: Sequence[HealthSource], environ: Mapping[str, str], every_s: float = _SOURCES_EVERY_S
    ) -> None:
        self._sources, self._environ, self._every_s = sources, environ, every_s
        self._over = threading.Event()
        self.latest: tuple[Opinion, ...] = ()

    def start(self) -> None:
        if self._sources:
            threading.Thread(target=self._run, name="health sources", daemon=True).start()

    def close(self) -> None:
        """End the thread without waiting: it may be blocked in a read."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            before = {opinion.place: opinion for opinion in self.latest}
            self.latest = tuple(self._asked(source, before.get(source.place)) for source in self._sources)
            self._over.wait(self._every_s)

    def _asked(self, source: HealthSource, before: Opinion | None) -> Opinion:
        """If the source fails, its last findings stay: nothing says that they are over."""
        try:
            return Opinion(source.place, source.ask(self._environ), has_answered=True)
        except SourceFailed as error:
            known = before or Opinion(source.place)
            return replace(known, problem=str(error))
