"""Reads what the ranks of a command inherit from it: the key of the template that can serve it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
from typing import TYPE_CHECKING

from launcher.settings.import_path import script_folder
from launcher.template import pool_folder
from rendezvous.values.contracts import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from launcher.settings.spec import LaunchSpec
    from launcher.template.pool_folder import Key

_STATUS = (
    "Umask Uid Gid Groups NoNewPrivs Seccomp Seccomp_filters Speculation_Store_Bypass SpeculationIndirectBranch "
    "Cpus_allowed_list Mems_allowed_list CapInh CapPrm CapEff CapBnd CapAmb SigBlk SigIgn THP_enabled"
).split()
_FILES = (
    "cgroup oom_score_adj personality coredump_filter timerslack_ns loginuid sessionid attr/current".split()
)
_TEMPLATE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "template")
_SYSTEM_CALLS = {"x86_64": (252, 239), "aarch64": (31, 236)}  # ioprio_get, get_mempolicy


def key_of(spec: LaunchSpec, environ: Mapping[str, str]) -> Key:
    """`environ`: of the ranks, as far as it is the same for all of them."""
    return {
        **pool_folder.of_variables(environ),
        "entry": f"{spec.entry.kind} {spec.entry.target}",
        "preloaded modules": " ".join(spec.preload),
        "script folder": script_folder(spec.entry),
        "folder": f"{os.getcwd()} {_file('.')}",
        "interpreter": f"{sys.executable} {_file(sys.executable)} {sys.version.partition(' ')[0]} {sys.prefix}",
        "ddp-launch": f"{VERSION} {_code()}",
        **dict(_of_process()),
    }


def _of_process() -> Iterator[tuple[str, str]]:
    status = _status()
    for name in _STATUS:
        yield f"process {name}", status.get(name, "")
    for name in _FILES:
        yield f"process {name}", digest_if_long(_text(f"/proc/self/{name}"))
    for name in sorted(each for each in dir(resource) if each.startswith("RLIMIT_")):
        soft, hard = resource.getrlimit(getattr(resource, name))
        yield f"limit {name[7:]}", f"{soft}:{hard}"
    yield "process nice", str(os.getpriority(os.PRIO_PROCESS, 0))
    yield "process scheduler", f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}"
    yield "process io priority and memory policy", _by_system_calls()
    yield "root folder", _file("/")
    for name in _listed("/proc/self/ns"):
        with contextlib.suppress(OSError):
            yield f"namespace {name}", os.readlink(f"/proc/self/ns/{name}")


def digest_if_long(text: str) -> str:
    return text if len(text) <= 200 else pool_folder.digest(text)


def _status() -> dict[str, str]:
    lines = (line.split(":", 1) for line in _text("/proc/self/status").splitlines())
    found = {each[0]: " ".join(each[1].split()) for each in lines if len(each) == 2}
    if "SigIgn" in found:  # ranks get SIGINT in any case, see `Zygote.start`
        found["SigIgn"] = f"{int(found['SigIgn'], 16) & ~(1 << signal.SIGINT - 1):016x}"
    return found


def _by_system_calls() -> str:
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return ""
    libc = ctypes.CDLL(None)
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 64)()
    of_io = libc.syscall(numbers[0], 1, 0)
    known = (
        libc.syscall(numbers[1], ctypes.byref(mode), nodes, 64 * 8 * ctypes.sizeof(ctypes.c_ulong), 0, 0) == 0
    )
    return f"{of_io} {mode.value if known else ''} {[each for each in nodes if each]}"


def _code() -> str:
    """Return a digest of the launcher's own files that a template has loaded."""
    files = (os.path.join(_TEMPLATE, name) for name in sorted(_listed(_TEMPLATE)) if name.endswith(".py"))
    return pool_folder.digest(" ".join(f"{file} {_file(file)}" for file in files))


def _file(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    is_folder = path in (".", "/")
    return f"{found.st_dev}:{found.st_ino}" + ("" if is_folder else f":{found.st_size}:{found.st_mtime_ns}")


def _listed(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return " ".join(file.read().split("\0")).strip()
    return ""
