"""Samples the state of this node periodically, in its own thread. A dead file server or a hanging driver can block this
thread, but not the agent.

It reads the memory and CPU cgroups (either version) and their ancestors, /proc/meminfo, memory pressure if the
kernel reports it, swapping, network interfaces and InfiniBand ports, free space, and GPUs through NVML. Whatever cannot
be read is omitted.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.health.gpus import open_gpus
from launcher.health.node_health import Disk, Memory, Nic, NodeReading, Throttling
from launcher.template.cgroup import folders as folders_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.sources.source import Poll

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Interfaces that the host creates itself: their drops do not describe the network.
_NOT_NETWORK = (
    *("lo", "veth", "docker", "br-", "virbr", "cni", "cali", "flannel", "lxc", "ifb", "dummy", "tap", "tun"),
    "bonding_masters",
)
_IB_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors")


class Node:
    """The sources of one node. `root` is put before /proc and /sys (for tests)."""

    def __init__(self, disks: Sequence[str] = (), poll: Poll | None = None, *, root: str = "") -> None:
        self._root, self._disks, self._poll = root, tuple(disks), poll
        self._memory_folders = self._upwards("memory")
        self._cpu_folders = self._upwards("cpu")
        self._gpus = open_gpus()

    def _upwards(self, controller: str) -> list[str]:
        """List the folders from the agent's own cgroup up to the outermost visible one."""
        folders: list[str] = []
        for folder in folders_of("self", controller):
            while os.path.exists(os.path.join(self._root + folder, "cgroup.procs")):
                folders.append(self._root + folder)
                folder = os.path.dirname(folder)
        return folders

    def read(self) -> NodeReading:
        return NodeReading(
            at=time.monotonic(),
            memory=max(self._memories(), key=lambda memory: memory.share, default=None),
            stalled=self._stalled(),
            swapped=self._swapped(),
            throttling=self._throttling(),
            nics=(*self._nics(), *self._ports()),
            gpus=self._gpus.read() if self._gpus is not None else (),
            disks=tuple(_disks(self._disks)),
            outside=self._poll.latest if self._poll is not None else (),
        )

    # --- memory --------------------------------------------------------------------------------------

    def _memories(self) -> Iterator[Memory]:
        machine = _table(f"{self._root}/proc/meminfo")
        total = machine.get("MemTotal:", 0) << 10
        kills = 0
        for folder in self._memory_folders:
            memory = _of_cgroup(folder, total)
            if memory is not None:
                kills = max(kills, memory.oom_kills)
                yield memory
        if total:
            used = total - (machine.get("MemAvailable:", 0) << 10)
            yield Memory("the machine's memory", used, total, kills)

    def _stalled(self) -> float:
        for folder in (*self._memory_folders, f"{self._root}/proc/pressure"):
            name = "memory" if folder.endswith("/pressure") else "memory.pressure"
            for line in _read(f"{folder}/{name}").splitlines():
                if line.startswith("full "):
                    return float(line.split()[1].partition("=")[2])
        return 0.0

    def _swapped(self) -> int:
        counts = _table(f"{self._root}/proc/vmstat")
        return (counts.get("pswpin", 0) + counts.get("pswpout", 0)) * _PAGE_BYTES

    # --- CPU -----------------------------------------------------------------------------------------

    def _throttling(self) -> Throttling | None:
        for folder in self._cpu_folders:
            words = _read(f"{folder}/cpu.max").split()
            if not words:
                words = [_read(f"{folder}/cpu.cfs_{each}_us").strip() for each in ("quota", "period")]
            if not all(word.isdecimal() for word in words):
                continue  # "max", or -1: no quota here
            counts = _table(f"{folder}/cpu.stat")
            cpus = int(words[0]) / int(words[1])
            return Throttling(counts.get("nr_periods", 0), counts.get("nr_throttled", 0), cpus)
        return None

    # --- network -------------------------------------------------------------------------------------

    def _nics(self) -> Iterator[Nic]:
        for line in _read(f"{self._root}/proc/net/dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            name, counts = name.strip(), numbers.split()
            if not name.startswith(_NOT_NETWORK) and len(counts) >= 12:
                carrier = _read(f"{self._root}/sys/class/net/{name}/carrier").strip() == "1"
                errors, drops = int(counts[2]) + int(counts[10]), int(counts[3]) + int(counts[11])
                yield Nic(name, errors, drops, carrier)

    def _ports(self) -> Iterator[Nic]:
        infiniband = f"{self._root}/sys/class/infiniband"
        with suppress(OSError):
            for device in sorted(os.listdir(infiniband)):
                for port in sorted(os.listdir(f"{infiniband}/{device}/ports")):
                    place = f"{infiniband}/{device}/ports/{port}"
                    errors = [_read(f"{place}/counters/{each}").strip() for each in _IB_ERRORS]
                    total = sum(int(each) for each in errors if each.isdecimal())
                    up = _read(f"{place}/state").startswith("4:")
                    yield Nic(f"{device}/{port}", total, 0, up)


def _of_cgroup(folder: str, machine: int) -> Memory | None:
    """Return None if the cgroup has no limit below the machine's memory."""
    second = os.path.exists(f"{folder}/memory.max")
    limit = _read(f"{folder}/{'memory.max' if second else 'memory.limit_in_bytes'}").strip()
    if not limit.isdecimal() or not 0 < int(limit) < machine:
        return None
    used = _read(f"{folder}/{'memory.current' if second else 'memory.usage_in_bytes'}").strip()
    counts = _table(f"{folder}/memory.stat")
    droppable = ("inactive_file", "slab_reclaimable") if second else ("total_inactive_file",)
    kills = _table(f"{folder}/{'memory.events' if second else 'memory.oom_control'}").get("oom_kill", 0)
    taken = int(used) if used.isdecimal() else 0
    free = sum(counts.get(name, 0) for name in droppable)
    return Memory("the cgroup's limit", max(0, taken - free), int(limit), kills)


def _disks(paths: Sequence[str]) -> Iterator[Disk]:
    for path in paths:
        with suppress(OSError):
            found = os.statvfs(path)
            yield Disk(path, found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _table(path: str) -> dict[str, int]:
    """Read a file whose lines begin with a name and a number."""
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


def _read(path: str) -> str:
    """Return "" if the file cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode(errors="replace")
    except OSError:  # for example the carrier of an interface that is down
        return ""
    finally:
        os.close(fd)


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
