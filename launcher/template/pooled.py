"""A template of the warm pool: it has imported torch, waits, and forks a zygote for each command that asks.

Theory of operation
-------------------
`launcher.warm_pool` starts this process as it would start a zygote: with the command line of the ranks. So it can serve
commands with this script only, under the same `pool_key`. It imports what a zygote imports, announces itself in the
folder of the pool, and waits on a socket there. Each request comes with the descriptors of the command. The reply is
quick: either the reason why not, or a fork (`guardian`), whose fork in turn continues as the zygote.

The template itself never runs a job. So nothing of a job can reach the next one, and many jobs can run at a time.

When a command has learned what its script imports, the template forks another one, which imports the same. It serves
while the arguments of the script are the same, and no file of the user has changed that the ranks have executed
(`lessons`). So there are two templates for a script: one with its imports, and one for the script when it has been
edited.

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

from . import command_line, freshness, guardian, learner, lessons, memory, pool_key, pool_wire
from .forking import fork, freeze_garbage
from .handover import Handover
from .pool_folder import Unusable, open_folder, peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from .freshness import Snapshot
    from .pool_folder import Folder

_REQUEST_S = 2.0
_SPARE_BYTES = 2 << 30
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
        self._branched = ""  # the name of the last template that it has forked
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
        if (handover := self._branch()) is not None:
            return handover
        while True:
            for fd, _events in self._poll.poll(self._patience_s() * 1000 + 1):
                if fd in self._jobs:
                    self._job_ended(fd)
                    if (handover := self._branch()) is not None:
                        return handover
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

    def _branch(self) -> Handover | None:
        """Begin a template that has learned, if there is something to learn. Return only in its zygotes."""
        lesson = lessons.take(self._folder.inside(f"{self._name}.lesson"))
        if lesson is None or pool_key.has_learned(self._config["key"]):
            return None
        key = pool_key.learned(self._config["key"], lesson.args)
        name = pool_key.name_of(key)
        with self._folder.locked():
            settings = self._folder.settings()
            others = [each for each in self._folder.templates() if each not in (name, self._branched)]
            if (
                settings is None
                or len(others) >= settings.most_templates
                or memory.free_bytes() < _SPARE_BYTES
            ):
                return None
            for before in {name, self._branched} & set(self._folder.templates()):
                self._end_other(before)
            listener, self._branched = self._folder.listen(name), name
        if not _is_forked_apart():
            listener.close()
            return None
        try:
            self._forget_jobs()
            title = f"{self._config['title']} with its imports"
            changes = {"listener": listener.detach(), "name": name, "key": key, "title": title}
            learner.learn_again(lesson)
            branch = Template(self._config | changes, self._folder, self._shadowed)
            snapshot = freshness.take(sys.modules, sys.path, freshness.loaded_libraries())
            if reason := _threads():
                branch.end(reason)
            return branch.serve(snapshot._replace(files=snapshot.files | lesson.files))
        except BaseException:
            os._exit(70)

    def _end_other(self, name: str) -> None:
        """End the template that has learned from the script before its last change, or with other arguments."""
        with contextlib.suppress(OSError), self._folder.connect(name, _REQUEST_S) as connection:
            pool_wire.send(connection, {"want": "end"})
            pool_wire.receive(connection)
        self._folder.forget(name)

    def _forget_jobs(self) -> None:
        self._listener.close()
        for fd in self._jobs:
            os.close(fd)
        self._jobs.clear()

    def _why_not(self, request: dict[str, Any]) -> str:
        assert self._snapshot is not None
        if request["key"] != self._config["key"]:
            return "the command differs from the one that the template was made for"
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
    config: dict[str, Any], obstacle: str, shadowed: Callable[[], str]
) -> tuple[Handover, tuple[bytes, bytes]]:
    """Be a template. Return in a zygote, with what the imports have printed."""
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


def _is_forked_apart() -> bool:
    """Fork. Return True in the new process, which is no child of this one."""
    pid, obstacle = fork()
    if obstacle:
        return False
    if pid:
        os.waitpid(pid, 0)
        return False
    if fork()[0] != 0:
        os._exit(0)
    return True


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
