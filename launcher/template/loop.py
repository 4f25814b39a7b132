"""The zygote's loop: one socket from the agent, one signal for ended children; see the package for the theory.

Agent to zygote: `spawn` (descriptors: stdout, stderr), `keep` a store, `signal` ranks, `sweep` a generation.
Zygote to agent: `ready`, `started`, `exited`, `keeping`, `swept`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from . import cgroup, rank, store, tree, wire


@dataclass
class _Child:
    local_rank: int
    generation: int
    started: float
    group: bool  # signals go to its whole process group


class Loop:
    def __init__(self, control: socket.socket, warm_obstacle: str = "", warm: bool = True) -> None:
        self._control = control
        self._warm = warm and not warm_obstacle
        self._obstacle = warm_obstacle
        self._ranks: dict[int, _Child] = {}
        self._keepers: set[int] = set()
        self._sweeping: int | None = None
        self._left_over = 0
        self._reserved: socket.socket | None = None
        self._cgroup = ""
        self._pid = os.getpid()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self, import_s: float, cgroup_folder: str) -> None:
        """Returns in a warm rank only; the zygote itself ends with the agent's socket."""
        tree.become_subreaper()
        if cgroup_folder and cgroup.join(cgroup_folder):
            self._cgroup = cgroup_folder
        if self._warm:
            _freeze_garbage()
        signal.signal(signal.SIGCHLD, _woken)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._tell({"event": "ready", "warm": self._warm, "reason": self._obstacle, "import_s": import_s})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            for fd, _events in poll.poll():
                if fd == self._wake_r:
                    self._reap()
                elif self._obey() == "rank":
                    return

    def _obey(self) -> str:
        try:
            received = wire.receive(self._control)
        except OSError:
            received = None
        if received is None:
            self._end()
        message, fds = received
        match message["order"]:
            case "spawn":
                return self._spawn(message, fds)
            case "keep":
                self._keep(message)
            case "signal":
                self._signal(message)
            case "sweep":
                self._sweeping = message["generation"]
                self._left_over = len(tree.descendants(self._pid)) - len(self._keepers)
                self._sweep()
        return ""

    def _spawn(self, message: wire.Message, fds: list[int]) -> str:
        pid = _fork()
        if pid == 0:
            with rank.death_on_error():
                self._forget_zygote()
                rank.become(message, fds, parent=self._pid)
                if not self._warm:
                    rank.execute(message["argv"])
                return "rank"
        for fd in fds:
            os.close(fd)
        child = _Child(message["rank"], message["generation"], time.monotonic(), message["group"])
        self._ranks[pid] = child
        self._tell({"event": "started", "rank": child.local_rank, "generation": child.generation, "pid": pid})
        return ""

    def _forget_zygote(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _keep(self, message: wire.Message) -> None:
        """Listens before it answers, so whoever learns the port can connect, however long the fork takes."""
        answer = {"event": "keeping", "generation": message["generation"], "kept": self._warm}
        try:
            sock = store.bound_socket(message["host"], message["port"], listen=self._warm)
        except OSError as error:
            self._tell(answer | {"port": 0, "error": f"{error.strerror}"})
            return
        answer |= {"port": sock.getsockname()[1], "error": ""}
        if self._warm:
            pid = _fork()
            if pid == 0:
                with rank.death_on_error():
                    self._forget_zygote()
                    tree.die_with_parent(self._pid)
                    store.keep(sock, message["host"])
            self._keepers.add(pid)
            sock.close()
        else:
            # Without torch nobody here can keep a store: rank 0's own will take this port, reserved until then.
            self._reserved = sock
        self._tell(answer)

    def _signal(self, message: wire.Message) -> None:
        wanted = message["ranks"]
        for pid, child in self._ranks.items():
            if wanted is None or child.local_rank in wanted:
                with contextlib.suppress(ProcessLookupError):
                    to_group = child.group or message["signal"] == signal.SIGKILL
                    (os.killpg if to_group else os.kill)(pid, message["signal"])

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        now = time.monotonic()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._keepers.discard(pid)
            child = self._ranks.pop(pid, None)
            if child is not None:
                self._tell_exit(pid, child, status, now)
        if self._sweeping is not None:
            self._sweep()

    def _tell_exit(self, pid: int, child: _Child, status: int, now: float) -> None:
        self._tell(
            {
                "event": "exited",
                "rank": child.local_rank,
                "generation": child.generation,
                "pid": pid,
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
                "ran_s": now - child.started,
            }
        )

    def _sweep(self) -> None:
        """One step: kill what is there; the end of each child brings us here again, until nothing is left."""
        if not tree.kill_all(self._pid):
            self._tell({"event": "swept", "generation": self._sweeping, "killed": self._left_over})
            self._sweeping = None

    def _end(self) -> NoReturn:
        """The agent is gone, or wants us gone: so is everything below us."""
        tree.reap_all(self._pid)
        if self._cgroup:
            cgroup.leave(self._cgroup)
            cgroup.kill(self._cgroup)
            cgroup.remove(self._cgroup)
        os._exit(0)

    def _tell(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # a dead agent: the next read of the socket ends us
            wire.send(self._control, message)


def _woken(_signum: int, _frame: Any) -> None:
    """Only so that the signal writes to the wake-up descriptor."""


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        # A library's idle worker threads do not survive into the child, and need not: Python warns all the same.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _freeze_garbage() -> None:
    """What torch's import left is for ever: collections in the ranks need not walk it, nor copy its pages."""
    import gc

    gc.collect()
    gc.freeze()
