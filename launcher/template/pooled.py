"""A template of the warm pool: it has imported torch, waits, and forks a zygote for each command that asks.

Theory of operation
-------------------
`launcher.warm_pool` starts this process as it would start a zygote: with the command line of the ranks. So it can serve
commands with this script only, under the same `pool_key`. It imports what a zygote imports, announces itself in the
folder of the pool, and waits on a socket there. Each request comes with the descriptors of the command. The reply is
quick: either the reason why not, or a fork (`guardian`), whose fork in turn continues as the zygote.

The template itself never runs a job. So nothing of a job can reach the next one, and many jobs can run at a time.

It ends when it has served nobody for a while, when it is told to, and when a file that it has imported has changed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from . import command_line, freshness, guardian, memory, pool_key, pool_wire
from .forking import fork, freeze_garbage
from .handover import Handover
from .pool_folder import Unusable, open_folder, peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .freshness import Snapshot
    from .pool_folder import Folder

_REQUEST_S = 2.0
_STEP_S = 30.0  # between two looks at the folder


class Template:
    """`config` is what `launcher.warm_pool` has sent; `shadowed` looks again at the folder of the script."""

    def __init__(self, config: dict[str, Any], folder: Folder, shadowed: Callable[[], str]) -> None:
        self._config, self._folder, self._shadowed = config, folder, shadowed
        self._listener = socket.socket(fileno=config["listener"])
        self._name: str = config["name"]
        self._own = os.stat(folder.inside(f"{self._name}.sock")).st_ino
        self._jobs: dict[int, int] = {}  # guardians, by the descriptor that shows their end
        self._poll = select.poll()
        self._served = 0
        self._born = self._used = time.monotonic()
        self._snapshot: Snapshot | None = None

    def serve(self, snapshot: Snapshot) -> Handover:
        """Serve requests. Return only in a fork that is a zygote."""
        self._snapshot = snapshot
        freeze_garbage()
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        with contextlib.suppress(Exception):
            command_line.show([f"ddp-launch: warm template of {self._config['title']}"])
        if (used := memory.own_bytes()) > self._config["most_bytes"]:
            self.end(f"it takes {used >> 20} MiB, more than --warm-memory permits")
        self._folder.announce(self._name, self._config["key"])
        while True:
            for fd, _events in self._poll.poll(self._patience_s() * 1000 + 1):
                if fd in self._jobs:
                    self._job_ended(fd)
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
                return self._answer(connection, pool_wire.receive(connection)[0])
        connection.close()
        return None

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> Handover | None:
        match request["want"]:
            case "zygote":
                return self._hand_over(connection, request)
            case "state":
                pool_wire.send(connection, self.state())
            case "end":
                pool_wire.send(connection, {"ended": True})
                os._exit(0)  # who asks removes the files, and holds the lock
        connection.close()
        return None

    def _hand_over(self, connection: socket.socket, asked: dict[str, Any]) -> Handover | None:
        reason = self._why_not(asked)
        pool_wire.send(connection, {"refused": reason} if reason else {"taken": True})
        if reason:
            self.end(reason)
        request, fds = pool_wire.receive(connection)
        pid, obstacle = fork()
        if pid == 0:
            try:
                self._forget()
                guardian.guard(connection, fds)
            except BaseException:
                os._exit(70)
            return Handover(request, fds)
        for fd in fds:
            os.close(fd)
        if obstacle:
            pool_wire.send(connection, {"obstacle": obstacle})
        else:
            self._note_job(pid)
        connection.close()
        return None

    def _why_not(self, request: dict[str, Any]) -> str:
        assert self._snapshot is not None
        if differences := pool_key.differences(request["key"], self._config["key"]):
            return f"the command differs from the one that the template was made for: {differences[0]}"
        return freshness.change(self._snapshot) or self._shadowed()

    def _note_job(self, pid: int) -> None:
        self._served += 1
        self._used = time.monotonic()
        ended = os.pidfd_open(pid)
        self._jobs[ended] = pid
        self._poll.register(ended, select.POLLIN)

    def _job_ended(self, fd: int) -> None:
        self._poll.unregister(fd)
        os.close(fd)
        os.waitpid(self._jobs.pop(fd), 0)
        self._used = time.monotonic()

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
            "bytes": memory.own_bytes(),
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
    config = config | {"key": pool_key.of_template(config["key"], read)}
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
