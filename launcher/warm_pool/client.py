"""The templates of the pool: what a command asks of one, the zygote that it gives, and the start of the next one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import platform
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from launcher.ranks.zygote import Zygote
from launcher.settings.import_path import script_folder
from launcher.settings.spec import LaunchSpec
from launcher.template import cgroup, pool_folder
from launcher.template.pool_folder import Key, PoolFolder, PoolSettings, peer
from rendezvous.values.contracts import VERSION

# --- a zygote of the pool --------------------------------------------------------------------------
#
# A zygote that was forked from a template: not our child. Its guardian tells how it ends.

_FIRST_WORDS_S = 0.1


class PooledZygote(Zygote):
    is_pooled = True

    def __init__(self, control: socket.socket, lifeline: socket.socket) -> None:
        super().__init__(0, control, warm=True)
        self._lifeline = lifeline
        self._ended: int | None = None

    def process(self) -> int:
        """The guardian tells it first of all."""
        if not self.pid:
            self._take(time.monotonic() + _FIRST_WORDS_S)
        return self.pid

    def await_end(self, timeout_s: float) -> int | None:
        """Wait until the zygote and everything it has left have ended. Return its wait status, or None if unknown."""
        give_up = time.monotonic() + timeout_s
        while self._ended is None and self._take(give_up):
            pass
        return self._ended

    def _take(self, give_up: float) -> bool:
        """Take one message of the guardian. Return whether there was one."""
        message = self._next(give_up)
        if message is None:
            return False
        if "ended" in message:
            self._ended = int(message["ended"])
        self.pid = int(message.get("zygote", self.pid))
        return True

    def _next(self, give_up: float) -> dict[str, Any] | None:
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            return None
        with contextlib.suppress(OSError):
            self._lifeline.settimeout(left_s)
            return pool_folder.receive(self._lifeline)[0]
        return None


# --- what commands ask of a template ---------------------------------------------------------------
#
# What commands ask of a template: a zygote, its state, its end.

_REPLY_S = 1.0
_END_S = 3.0


class NotServed(Exception):
    """Why no template serves this command."""


def serving(folder: PoolFolder, name: str, key: Key) -> str:
    """Return the name of a template that can serve a command with this key; else its own name."""
    fitting = [each for each, theirs in folder.keys().items() if not pool_folder.differences(key, theirs)]
    return next((each for each in fitting if is_there(folder, each)), name)


def take(folder: PoolFolder, name: str, request: dict[str, Any]) -> PooledZygote:
    """Raises `NotServed`."""
    control, theirs = socket.socketpair()
    try:
        lifeline = _ask_for_zygote(folder, name, request, theirs)
    except BaseException:
        control.close()
        raise
    finally:
        theirs.close()
    return PooledZygote(control, lifeline)


def _ask_for_zygote(
    folder: PoolFolder, name: str, request: dict[str, Any], theirs: socket.socket
) -> socket.socket:
    try:
        connection = folder.connect(name, _REPLY_S)
    except OSError as error:
        raise NotServed(f"its template cannot be reached: {error.strerror}") from None
    try:
        # Without descriptors yet: those that are not received would keep the output of the command open.
        pool_folder.send(connection, {"want": "zygote", "key": request["key"]})
        reply, _ = pool_folder.receive(connection)
        if "taken" in reply:
            pool_folder.send(connection, request, (theirs.fileno(), 0, 1, 2))
    except OSError as error:
        connection.close()
        raise NotServed(f"its template does not answer: {error.strerror or error}") from None
    if "taken" not in reply:
        connection.close()
        raise NotServed(str(reply.get("refused", "its template does not know the request")))
    return connection


def state_of(folder: PoolFolder, name: str, timeout_s: float = _REPLY_S) -> dict[str, Any] | None:
    """Return None if the template has ended, or does not answer in time."""
    with contextlib.suppress(OSError), folder.connect(name, timeout_s) as connection:
        pool_folder.send(connection, {"want": "state"})
        return pool_folder.receive(connection)[0]
    return None


def is_there(folder: PoolFolder, name: str) -> bool:
    """Whether a process listens: it may still import."""
    with contextlib.suppress(OSError), folder.connect(name, _REPLY_S):
        return True
    return False


def end(folder: PoolFolder, name: str) -> bool:
    """End a template, by force if it does not answer. Its jobs go on. Return False if it had ended already."""
    try:
        connection = folder.connect(name, _REPLY_S)
    except OSError:
        folder.forget(name)
        return False
    with connection, contextlib.suppress(OSError):
        process = os.pidfd_open(peer(connection).pid)
        try:
            with contextlib.suppress(OSError):
                pool_folder.send(connection, {"want": "end"})
            if not _ends(process):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                _ends(process)
        finally:
            os.close(process)
    folder.forget(name)
    return True


def _ends(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_END_S * 1000))


# --- the next template -----------------------------------------------------------------------------
#
# Leaves a process that becomes a template when the command has ended.
#
# It is forked before the command changes its own limits and signals. So the template has the folder, limits,
# priority and control group of the command. It only belongs to no terminal, as the zygote of a job. It waits until
# the command has ended: the job needs the processors.

_LEAST_FREE_BYTES = 1 << 30
_PRINTED_BYTES = 1 << 20  # by imports
_SET_PIPE_SIZE = 1031


class Recipe(NamedTuple):
    """What a template is started with. `command` makes argv and environment from the configuration of the pool."""

    folder: PoolFolder
    name: str
    key: Key
    title: str
    args: tuple[str, ...]
    command: Callable[[dict[str, Any]], tuple[tuple[str, ...], dict[str, str]]]


def plant(recipe: Recipe) -> int:
    """Leave a seed. It becomes a template once the returned descriptor is closed."""
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            gc.disable()
            os.setsid()
            if os.fork() == 0:
                _wait_and_become(recipe, read)
        finally:
            os._exit(0)
    os.close(read)
    os.waitpid(pid, 0)
    return write


def _wait_and_become(recipe: Recipe, read: int) -> NoReturn:
    """In a process of its own, which is not a child of the command any more."""
    try:
        spared = {read, recipe.folder.fd}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in spared:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        for _ in range(3):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        recipe.folder.hold_seed()
        while os.read(read, 1):
            pass
        _become(recipe)
    except BaseException as error:
        recipe.folder.note(f"no template of {recipe.title}: {type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _become(recipe: Recipe) -> None:
    folder = recipe.folder
    with folder.locked():
        settings = folder.settings()
        if settings is None or is_there(folder, serving(folder, recipe.name, recipe.key)):
            return
        if cgroup.free_bytes() < _LEAST_FREE_BYTES:
            folder.note(f"no template of {recipe.title}: less than 1 GiB of memory is free")
            return
        _make_room(folder, settings)
        listener = folder.listen(recipe.name)
    argv, env = recipe.command(_configuration(recipe, settings, listener, _pipes()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(listener.fileno(), True)
    os.execve(argv[0], argv, env)


def _pipes() -> list[int]:
    """Lead standard output and error into pipes, as those of a rank do. Return their other ends.

    They keep what the imports print. When they are full, a write fails: they are read after the import.
    """
    reads = []
    for target in (1, 2):
        read, write = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(write, _SET_PIPE_SIZE, _PRINTED_BYTES)
        os.dup2(write, target)
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        os.set_inheritable(read, True)
        os.close(write)
        reads.append(read)
    return reads


def _configuration(
    recipe: Recipe, settings: PoolSettings, listener: socket.socket, output: list[int]
) -> dict[str, Any]:
    return {
        "listener": listener.fileno(),
        "output": output,
        "folder": recipe.folder.path,
        "name": recipe.name,
        "key": recipe.key,
        "title": recipe.title,
        "args": recipe.args,
        "idle_s": settings.idle_s,
        "most_bytes": settings.most_bytes,
        "started": time.time(),
    }


def _make_room(folder: PoolFolder, settings: PoolSettings) -> None:
    """End templates that were not used for the longest time, until one more is permitted."""
    known, silent = [], 0
    for name in folder.templates():
        if (state := state_of(folder, name)) is not None:
            known.append((state["last_used"], name, state))
        elif is_there(folder, name):
            silent += 1  # it still imports
        else:
            folder.forget(name)
    known.sort(key=lambda each: each[:2])
    while known and (
        silent + len(known) >= settings.most_templates
        or sum(each[2]["bytes"] for each in known) > settings.most_bytes
    ):
        _, name, state = known.pop(0)
        end(folder, name)
        folder.note(f"the template of {state['title']} has ended: another one takes its place")


# Reads what the ranks of a command inherit from it: the key of the template that can serve it.

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
