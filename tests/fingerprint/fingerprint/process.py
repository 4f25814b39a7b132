"""What the kernel knows of this process."""

import ctypes
import errno
import fcntl
import os
import re
import resource
import signal
import stat

_SETS_OF_SIGNALS = ("SigBlk", "SigIgn", "SigCgt", "ShdBlk")
_WORDS = ("Umask", "Seccomp", "NoNewPrivs", "Groups", "Uid", "Gid", "Cpus_allowed_list", "Mems_allowed_list")
_WORDS += (
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "CoreDumping",
    "THP_enabled",
    "Speculation_Store_Bypass",
)
_FILES = (
    "comm",
    "limits",
    "oom_score_adj",
    "coredump_filter",
    "timerslack_ns",
    "personality",
    "cgroup",
    "loginuid",
)
_FILES += ("sessionid", "attr/current")
_PRCTL = {"parent death signal": 2, "child subreaper": 37}  # they write a number
_PRCTL_VALUES = {"dumpable": 3, "keep capabilities": 7, "no new privileges": 39, "timer slack": 30, "tsc": 25}
_STANDARD, _HIGH = 3, 256  # descriptors
_DIGITS = re.compile(r"\d+")


def look():
    status = _status()
    return {
        "status": {name: status.get(name) for name in _WORDS},
        "signals": {name: _signals(status.get(name, "0")) for name in _SETS_OF_SIGNALS},
        "threads": status["Threads"],
        "files": {name: _text(f"/proc/self/{name}") for name in _FILES},
        "command line": _text("/proc/self/cmdline").split("\0"),
        "first environment": dict.fromkeys(
            sorted(word.partition("=")[0] for word in _text("/proc/self/environ").split("\0") if word), "set"
        ),
        "environment": dict(os.environ),
        "environment in C": _environment_in_c(),
        "prctl": _prctl(),
        "descriptors": _descriptors(),
        "folder": os.getcwd(),
        "root": os.readlink("/proc/self/root"),
        "program": os.readlink("/proc/self/exe"),
        "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getpgrp() == os.getsid(0)],
        "terminal": _terminal(),
        "children": _text("/proc/thread-self/children").split(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "affinity": sorted(os.sched_getaffinity(0)),
        "resources": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "timers": [
            signal.getitimer(which)
            for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
    }


def _text(path):
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read().rstrip("\n\0")
    except OSError as error:
        return errno.errorcode[error.errno]


def _status():
    lines = (line.split(":", 1) for line in _text("/proc/self/status").splitlines())
    return {name: " ".join(words.split()) for name, words in lines}


def _signals(mask):
    number = int(mask, 16)
    return {str(each + 1): "yes" for each in range(64) if number >> each & 1}


def _environment_in_c():
    """Names whose value in C is not that of os.environ: a library would see another one."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    seen = {name: libc.getenv(os.fsencode(name)) for name in os.environ}
    return {name: repr(value) for name, value in seen.items() if value != os.fsencode(os.environ[name])}


def _prctl():
    libc = ctypes.CDLL(None)
    found = {}
    for name, number in _PRCTL.items():
        value = ctypes.c_int(-1)
        libc.prctl(number, ctypes.byref(value), 0, 0, 0)
        found[name] = value.value
    return found | {name: libc.prctl(number, 0, 0, 0, 0) for name, number in _PRCTL_VALUES.items()}


def _descriptors():
    """The standard ones by number; how many there are of each kind, of the others: their order may change."""
    found = {}
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            words = _of_descriptor(int(name), os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the one that listed the folder
            continue
        if int(name) < _STANDARD:
            found[name] = words
        else:
            place = "high" if int(name) >= _HIGH else "low"
            found[f"{place} {words}"] = found.get(f"{place} {words}", 0) + 1
    return found


def _of_descriptor(number, target):
    kind = stat.S_IFMT(os.fstat(number).st_mode)
    flags, closed = fcntl.fcntl(number, fcntl.F_GETFL), fcntl.fcntl(number, fcntl.F_GETFD)
    access = {0: "read", 1: "write", 2: "both"}[flags & os.O_ACCMODE]
    words = [_DIGITS.sub("N", target) if ":" in target else target, stat.filemode(kind)[0], access]
    words += [word for word, bit in (("append", os.O_APPEND), ("non-blocking", os.O_NONBLOCK)) if flags & bit]
    return " ".join([*words, "closed by exec"] if closed & fcntl.FD_CLOEXEC else words)


def _terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        return errno.errorcode[error.errno]
    return "has one"
