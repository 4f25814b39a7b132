"""A template of the warm pool: it has imported torch, waits, and forks a zygote for each command that asks.

Theory of operation
-------------------
`launcher.warm_pool` starts this process as it would start a zygote: with the command line of the ranks. So it can serve
commands with this script only, under the same `pool_folder`. It imports what a zygote imports, announces itself in the
folder of the pool, and waits on a socket there. Each request comes with the descriptors of the command. The reply is
quick: either the reason why not, or a fork (the guardian), whose fork in turn continues as the zygote.

The template itself never runs a job. So nothing of a job can reach the next one, and many jobs can run at a time.

It ends when it has served no command for a while, on request, and when a file that it has imported has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import cgroup, freshness, pool_folder, tree
from .forking import fork, freeze_garbage
from .pool_folder import Unusable, open_folder, peer

if TYPE_CHECKING:
    from .freshness import ImportedFiles
    from .pool_folder import PoolFolder


_REQUEST_S = 2.0
_STEP_S = 30.0  # between two looks at the folder


class Template:
    """`config` is what `launcher.warm_pool` has sent; `shadowed` looks again at the folder of the script."""

    def __init__(self, config: dict[str, Any], folder: PoolFolder, shadowed: Callable[[], str]) -> None:
        self._config, self._folder, self._shadowed = config, folder, shadowed
        self._listener = socket.socket(fileno=config["listener"])
        self._name: str = config["name"]
        self._own = os.stat(folder.inside(f"{self._name}.sock")).st_ino
        self._jobs: dict[int, int] = {}  # guardians, by the descriptor that shows their end
        self._poll = select.poll()
        self._served = 0
        self._born = self._used = time.monotonic()
        self._snapshot: ImportedFiles | None = None

    def serve(self, snapshot: ImportedFiles) -> Handover:
        """Serve requests. Return only in a fork that is a zygote."""
        self._snapshot = snapshot
        freeze_garbage()
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        with contextlib.suppress(Exception):
            show([f"ddp-launch: warm template of {self._config['title']}"])
        if (used := cgroup.own_bytes()) > self._config["most_bytes"]:
            self.end(f"it takes {used >> 20} MiB, more than --warm-memory permits")
        self._folder.announce(self._name, self._config["key"])
        while True:
            for fd, _events in self._poll.poll(self._patience_s() * 1000 + 1):
                if fd in self._jobs:
                    self._poll.unregister(fd)
                    os.close(fd)
                    os.waitpid(self._jobs.pop(fd), 0)
                    self._used = time.monotonic()
                elif (handover := self._accept()) is not None:
                    return handover
            if not self._is_listed():
                self.end("its socket was removed")
            if self._idle_left_s() == 0.0:
                self.end(f"no command for {self._config['idle_s']:g} s", is_unused=True)

    def _patience_s(self) -> float:
        left_s = self._idle_left_s()
        return _STEP_S if left_s is None else min(_STEP_S, left_s)

    def _idle_left_s(self) -> float | None:
        """Return None while a job runs."""
        if self._jobs:
            return None
        return max(0.0, self._used + float(self._config["idle_s"]) - time.monotonic())

    def _accept(self) -> Handover | None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            connection.settimeout(_REQUEST_S)
            if peer(connection).uid == os.geteuid():
                return self._answer(connection, pool_folder.receive(connection)[0])
        connection.close()
        return None

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> Handover | None:
        match request["want"]:
            case "zygote":
                return self._hand_over(connection, request)
            case "state":
                pool_folder.send(connection, self.state())
            case "end":
                pool_folder.send(connection, {"ended": True})
                os._exit(0)  # who asks removes the files, and holds the lock
        connection.close()
        return None

    def _hand_over(self, connection: socket.socket, asked: dict[str, Any]) -> Handover | None:
        reason = self._why_not(asked)
        pool_folder.send(connection, {"refused": reason} if reason else {"taken": True})
        if reason:
            self.end(reason)
        request, fds = pool_folder.receive(connection)
        pid, obstacle = fork()
        if pid == 0:
            try:
                self._forget()
                guard(connection, fds)
            except BaseException:
                os._exit(70)
            return Handover(request, fds)
        for fd in fds:
            os.close(fd)
        if obstacle:
            pool_folder.send(connection, {"obstacle": obstacle})
        else:
            self._served += 1
            self._used = time.monotonic()
            ended = os.pidfd_open(pid)
            self._jobs[ended] = pid
            self._poll.register(ended, select.POLLIN)
        connection.close()
        return None

    def _why_not(self, request: dict[str, Any]) -> str:
        assert self._snapshot is not None
        if differences := pool_folder.differences(request["key"], self._config["key"]):
            return f"the command differs from the one that the template was made for: {differences[0]}"
        return freshness.change(self._snapshot) or self._shadowed()

    def _forget(self) -> None:
        """In a fork: leave what belongs to the template."""
        self._listener.close()
        for fd in self._jobs:
            os.close(fd)
        for fd in self._config["output"]:
            os.close(fd)
        self._folder.close()

    def _is_listed(self) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(self._folder.inside(f"{self._name}.sock")).st_ino == self._own
        return False

    def state(self) -> dict[str, Any]:
        return {
            "title": self._config["title"],
            "pid": os.getpid(),
            "age_s": time.monotonic() - self._born,
            "served": self._served,
            "running": len(self._jobs),
            "idle_left_s": self._idle_left_s(),
            "last_used": self._used,
            "bytes": cgroup.own_bytes(),
        }

    def end(self, reason: str, is_unused: bool = False) -> NoReturn:
        """End this template. The pool is off when its last template has ended for lack of use."""
        with contextlib.suppress(OSError), self._folder.locked():
            if self._is_listed():
                self._folder.forget(self._name)
            self._folder.note(f"the template of {self._config['title']} has ended: {reason}")
            if is_unused and not self._folder.templates():
                self._folder.turn_off()
                self._folder.note("the pool is off: its last template was not used")
        os._exit(0)


def serve(
    config: dict[str, Any], obstacle: str, read: Iterable[str], shadowed: Callable[[], str]
) -> tuple[Handover, tuple[bytes, bytes]]:
    """Be a template. Return in a zygote, with what the imports have printed. `read`: variables."""
    config = config | {"key": pool_folder.of_template(config["key"], read)}
    try:
        folder = open_folder(config["folder"])
        template = Template(config, folder, shadowed)
    except (OSError, Unusable):
        os._exit(0)
    snapshot = freshness.take(sys.modules, sys.path, freshness.loaded_libraries())
    reason = (
        obstacle
        or freshness.starts_code_of_the_user()
        or freshness.changed_after(snapshot, config["started"])
        or _threads()
    )
    if reason:
        template.end(reason)
    printed = _printed(config["output"][0]), _printed(config["output"][1])
    return template.serve(snapshot), printed


def _threads() -> str:
    import threading

    return "its imports start a thread" if threading.active_count() > 1 else ""


def _printed(fd: int) -> bytes:
    """Return what was written into this pipe. The pipe stays: the streams of the template lead into it."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(fd, 1 << 16):
            found += part
    return found


# --- the guardian ----------------------------------------------------------------------------------
#
# The parent of a zygote that was forked from a template, for one job.
#
# A zygote that the agent starts is its child: the agent learns how it ended, and gets the processes that it leaves
# behind. A process cannot be given to another parent. So a fork of the template takes this part. It is a subreaper,
# and its only child is the zygote. When the zygote has ended, it ends what is left, and then tells the agent over a
# socket. If the agent ends, the zygote ends itself, as always, and the guardian follows. It does not depend on the
# template, which may end at any time.

_END_S = 20.0  # after the agent: the zygote needs some of it to end the ranks
_SEND_S = 2.0


def guard(lifeline: socket.socket, others: list[int]) -> None:
    """Call this in a fork of the template. It returns in the zygote only. `others` belong to the zygote."""
    os.setsid()
    tree.become_subreaper()
    pid, obstacle = fork()
    if pid == 0:
        os.setsid()
        lifeline.close()
        return
    for fd in others:
        os.close(fd)
    _leave_streams()
    lifeline.settimeout(_SEND_S)
    if obstacle:
        _tell(lifeline, {"obstacle": obstacle})
        os._exit(1)
    _tell(lifeline, {"zygote": pid})
    _stay(lifeline, pid)


def _leave_streams() -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        if null > 2:
            os.close(null)


def _stay(lifeline: socket.socket, zygote: int) -> NoReturn:
    try:
        status = _await(lifeline, zygote)
        tree.reap_all(os.getpid(), left_out=tree.is_cleaner)
        _tell(lifeline, {"ended": status})
    finally:
        os._exit(0)


def _await(lifeline: socket.socket, zygote: int) -> int:
    ended = os.pidfd_open(zygote)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(lifeline, select.POLLRDHUP)
    give_up = 0.0
    while True:
        left_s = max(0.0, give_up - time.monotonic()) if give_up else None
        found = dict(poll.poll(None if left_s is None else left_s * 1000 + 1))
        if ended in found:
            return os.waitpid(zygote, 0)[1]
        if give_up and time.monotonic() >= give_up:
            os.kill(zygote, signal.SIGKILL)
        elif lifeline.fileno() in found:  # the agent has ended: the zygote sees that, too
            poll.unregister(lifeline)
            give_up = time.monotonic() + _END_S


def _tell(lifeline: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        pool_folder.send(lifeline, message)


# --- the zygote of a command -----------------------------------------------------------------------
#
# Turns a fork of a template into the zygote of a command: what the template could not know is set here.
#
# What cannot be set, such as limits or the control group, is equal already: it belongs to the key (`pool_folder`).


class Handover(NamedTuple):
    """What a command has sent. The descriptors: the zygote's end of a socket, and the standard streams."""

    request: dict[str, Any]
    fds: list[int]


def take_over(handover: Handover, old_args: tuple[str, ...], printed: tuple[bytes, bytes]) -> None:
    """`printed`: what the imports of the template have written to standard output and error."""
    request, (_control, *streams) = handover
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    _set_environment(request["env"])
    show(request["argv"])
    set_arguments(list(old_args), request["args"])
    _renew_standard_input()
    # `%(relativeCreated)d` counts from the import of logging, which is the only one of torch that reads the time.
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        import time

        is_integer = isinstance(logging._startTime, int)
        logging._startTime = time.time_ns() if is_integer else time.time()
    for fd, text in zip((1, 2), printed, strict=True):
        if text:
            with contextlib.suppress(OSError):
                os.write(fd, text)


def _set_environment(wanted: dict[str, str]) -> None:
    """In the order of the command's own, which a script can see."""
    os.environ.clear()
    os.environ.update(wanted)


def set_arguments(old: list[str], new: list[str]) -> None:
    """The arguments of the script are the last words of the command line."""
    for words in (sys.argv, sys.orig_argv):
        del words[len(words) - len(old) :]
        words += new


def _renew_standard_input() -> None:
    """Open it as the interpreter does at its start: the stream remembers of its file whether it can be sought in."""
    old: Any = sys.stdin
    buffer: Any = open(0, "rb", -1, closefd=False)
    buffer.raw.name = "<stdin>"
    stream: Any = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    stream.mode = "r"
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stream)


# --- its command line ------------------------------------------------------------------------------
#
# Sets the command line that `ps` shows for this process.
#
# A template is started before the arguments of its ranks are known. The kernel lets a process say where its arguments
# are (PR_SET_MM_MAP), without privileges.

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
# The numbers of the fields in /proc/PID/stat, in the order of the kernel's structure; 0: not in the file.
_ADDRESSES = {
    "start_code": 26,
    "end_code": 27,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "brk": 0,
    "start_stack": 28,
    "arg_start": 48,
    "arg_end": 49,
    "env_start": 50,
    "env_end": 51,
}


class _Map(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


class _Kept(NamedTuple):
    memory: mmap.mmap
    view: ctypes.Array[ctypes.c_char]


_kept: list[_Kept] = []  # the kernel reads them for as long as the process lives


def show(argv: list[str]) -> bool:
    """Return False if the kernel does not permit it. Nothing has changed then."""
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in argv)
    # Private memory: the kernel does not read arguments from shared pages.
    memory = mmap.mmap(-1, max(len(text), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    view = (ctypes.c_char * max(len(text), 1)).from_buffer(memory)
    _kept.append(_Kept(memory, view))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    layout = _Map(auxv_size=0, exe_fd=_NO_FILE)
    for name, number in _ADDRESSES.items():
        setattr(layout, name, int(fields[number - 3]) if number else libc.sbrk(0))
    layout.arg_start = ctypes.addressof(view)
    layout.arg_end = layout.arg_start + len(text)
    return not libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0)
