"""Memory, limits, name, interface and disks of this machine, as the kernel reports them. No part needs root."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import tempfile
import time
from typing import TYPE_CHECKING

from launcher.joining import addresses
from launcher.machine.small_files import names_in, text_of
from launcher.preflight.checkup import (
    KB,
    MB,
    Interface,
    Memory,
    Network,
    ProcessLimits,
    SharedMemory,
    Storage,
)
from launcher.template.cgroup import memberships, upwards

if TYPE_CHECKING:
    from launcher.settings.spec import LaunchSpec

_SHM = "/dev/shm"
_SIOCGIFFLAGS, _SIOCGIFMTU, _IFF_UP = 0x8913, 0x8921, 0x1
_NO_LIMIT = 1 << 60  # cgroups of version 1 report such a number if there is no limit


# --- memory ------------------------------------------------------------------------------------------


def memory(root: str = "/") -> Memory:
    told = {}
    for line in text_of(os.path.join(root, "proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            told[name] = int(words[0]) * KB
    limit, used = _group_memory(root)
    return Memory(told.get("MemTotal", 0), told.get("MemAvailable", told.get("MemFree", 0)), limit, used)


def _group_memory(root: str) -> tuple[int | None, int]:
    """The lowest limit of our cgroup and its ancestors, and the used memory that the kernel cannot reclaim."""
    tightest: tuple[int | None, int] = (None, 0)
    for controllers, path in memberships("self", root):
        if controllers and "memory" not in controllers:
            continue
        mount = os.path.join(root, "sys/fs/cgroup", *(["memory"] if controllers else []))
        names = _VERSION_1 if controllers else _VERSION_2
        for folder in upwards(mount, path):
            limit, used = _limit_in(folder, *names)
            if limit is not None and (tightest[0] is None or limit - used < tightest[0] - tightest[1]):
                tightest = (limit, used)
    return tightest


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _limit_in(folder: str, limit_name: str, used_name: str, cache_name: str) -> tuple[int | None, int]:
    text, used = (text_of(os.path.join(folder, name)).strip() for name in (limit_name, used_name))
    if not text.isdecimal() or not used.isdecimal() or int(text) >= _NO_LIMIT:
        return None, 0
    cached = 0
    for line in text_of(os.path.join(folder, "memory.stat")).splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name and value.isdecimal():
            cached = int(value)
    return int(text), max(0, int(used) - cached)


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
