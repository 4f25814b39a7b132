"""The zygote's loop: reads one socket (agent) and one signal (SIGCHLD). The package docstring explains the design.

`messages` defines the messages. The loop never waits for the agent: `wire` keeps what the socket does not accept yet.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from . import cgroup, debugging, messages, rank, scratch, stacks, terminal_size, tree, wire
from .endings import Endings, has_ended
from .forking import fork, freeze_garbage
from .keepers import Keepers, bound
from .messages import Exited, Keep, Ready, Retire, Signal, Signalled, Spawn, Started, Sweep, Swept
from .process_stat import process_stat
from .sent_signals import SentSignals
from .sweeping import Sweeper, traces_of_streams

if TYPE_CHECKING:
    import socket

    from .late_variables import LateVariables
    from .learning import Learner, Notes


@dataclass
class _Child:
    local_rank: int
    generation: int
    group: bool  # signals go to its whole process group
    told: int = 0  # the last signal that it was sent before it ended


class Loop:
    def __init__(
        self,
        control: socket.socket,
        warm_obstacle: str = "",
        warm: bool = True,
        learns: bool = False,
    ) -> None:
        self._control = control
        self._inbox = wire.Inbox(control)
        self._outbox = wire.Outbox(control)
        self._poll = select.poll()
        self._warm = warm and not warm_obstacle
        self._obstacle = warm_obstacle
        self._ranks: dict[int, _Child] = {}
        self._endings = Endings()
        self._keepers = Keepers(self._forget_zygote, self._tell)
        self._sweeper = Sweeper(
            lambda generation, killed: self._tell(Swept(generation, killed)), self._ranks.keys
        )
        self._reserved: socket.socket | None = None
        self._cgroup = ""
        self._scratch = ""
        self._scratch_lock = -1
        self._pid = os.getpid()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._learner: Learner | None = None
        self.notes: Notes | None = None  # in a rank
        self._late: dict[int, LateVariables] = {}
        self.late: LateVariables | None = None  # in a rank
        self._is_late_told = False
        if learns and self._warm:
            from .learning import Learner

            self._learner = Learner(self._learned)

    def serve(self, import_s: float, cgroup_folder: str, scratch_folder: str) -> None:
        """Serve the agent. Return only in a warm rank; the zygote itself exits when the agent's socket closes."""
        tree.become_subreaper()
        tree.outlive_parent()  # from here on the socket shows when the agent ends, and the loop cleans up after it
        if cgroup_folder and cgroup.enter(cgroup_folder):
            self._cgroup = cgroup_folder
        with contextlib.suppress(OSError):  # no space: a rank that needs the folder reports it
            self._scratch_lock = scratch.make(scratch_folder)
            self._scratch = scratch_folder
        if self._warm:
            freeze_garbage()
        self._sent = SentSignals()
        signal.signal(signal.SIGCHLD, _woken)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wake_r, select.POLLIN)
        if self._sent.fd >= 0:
            self._poll.register(self._sent.fd, select.POLLIN)
        self._tell(Ready(self._warm, self._obstacle, import_s))
        scratch.remove_left_behind(scratch_folder)
        if self._cgroup:
            cgroup.remove_left_behind(self._cgroup)
        while True:
            for fd, events in self._poll.poll(self._patience_ms()):
                if fd == self._wake_r:
                    self._reap()
                    continue
                if fd == self._sent.fd:
                    self._forward_signals()
                    continue
                if events & select.POLLOUT:
                    self._flush()
                if events & ~select.POLLOUT and self._listen() == "rank":
                    return
            if self._sweeper.is_due:
                self._sweeper.sweep(len(self._keepers))
            self._keepers.turn()
            if self._learner is not None:
                self._learner.turn()
            self._tell_late()

    def _patience_ms(self) -> float | None:
        waits = [self._sweeper.wait_s(), self._keepers.wait_s()]
        waits_s = [wait_s for wait_s in waits if wait_s is not None]
        return min(waits_s) * 1000 + 1 if waits_s else None

    def _listen(self) -> str:
        """Process the received requests. Return "rank" in a forked child."""
        if not self._inbox.receive():
            self._end()
        while (received := self._inbox.take()) is not None:
            if self._obey(received) == "rank":
                return "rank"
        return ""

    def _obey(self, received: wire.Received) -> str:
        match received.message:
            case Spawn() as order:
                return self._spawn(order, received.fds)
            case Keep() as order:
                self._keep(order)
            case Signal(signum, ranks):
                self._signal(signum, ranks)
            case Sweep() as order:
                self._keepers.give_up()
                kept = tuple(pid for pid, child in self._ranks.items() if child.local_rank in order.kept)
                self._sweeper.begin(order, kept, len(self._keepers))
            case Retire():
                self._scratch = ""
                self._end()
        return ""

    def _spawn(self, order: Spawn, fds: tuple[int, ...]) -> str:
        child = _Child(order.local_rank, order.generation, order.has_group)
        notes = None if self._learner is None else self._learner.rank_starts(order.local_rank)
        late = self._late_variables(order.local_rank)
        pid, obstacle = fork()
        if pid == 0:
            with rank.exit_on_error():
                self._forget_zygote()
                self._sent.become_rank(order.env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""))
                rank.become(order, fds, parent=self._pid)
                if not self._warm:
                    rank.execute(order.argv, is_python=order.is_python)
                stacks.listen()
                terminal_size.follow_output()
                self.notes, self.late = notes, late
                debugging.enter()
                return "rank"
        traces = traces_of_streams(fds)
        for fd in fds:
            os.close(fd)
        if obstacle:
            why = f"a rank cannot be started: {obstacle}"
            self._tell(
                Exited(child.local_rank, child.generation, 0, messages.CANNOT_START, 0, 0.0, obstacle=why)
            )
            return ""
        self._ranks[pid] = child
        self._endings.watch(pid)
        self._sweeper.rank_started(pid, order, traces)
        self._tell(Started(child.local_rank, child.generation, pid))
        self._keepers.rank_started()
        return ""

    def _forget_zygote(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._endings.forget()
        self._inbox.close()  # with the descriptors of the ranks that come next
        self._control.close()
        os.close(self._wake_r)
        os.close(self._wake_w)
        if self._scratch_lock >= 0:
            os.close(self._scratch_lock)
        self._keepers.forget()

    def _learned(self, report: messages.Learned) -> None:
        freeze_garbage()
        self._tell(report)

    def _late_variables(self, local_rank: int) -> LateVariables | None:
        if not self._warm:
            return None
        from .late_variables import LateVariables

        self._late[local_rank] = LateVariables()
        return self._late[local_rank]

    def _tell_late(self) -> None:
        """Once for all ranks, which run the same script."""
        late = (
            None
            if self._is_late_told
            else next(filter(None, (each.read() for each in self._late.values())), None)
        )
        if late is not None:
            self._is_late_told = True
            self._tell(late)

    def _keep(self, order: Keep) -> None:
        """Start a store. Without torch this process cannot: it reserves the port until rank 0's own store takes it."""
        if self._warm:
            self._keepers.listen(order)
            return
        sock, answer = bound(order, is_kept=False)
        if sock is not None:
            if self._reserved is not None:
                self._reserved.close()
            self._reserved = sock
        self._tell(answer)

    def _signal(self, signum: int, wanted: tuple[int, ...] | None) -> None:
        for pid, child in self._ranks.items():
            if wanted is None or child.local_rank in wanted:
                child.told = signum if not has_ended(pid) else child.told
                _send_signal(pid, signum, to_group=child.group)
                if signum in (
                    signal.SIGTERM,
                    signal.SIGINT,
                ):  # a stopped process receives SIGTERM only after it continues
                    _send_signal(pid, signal.SIGCONT, to_group=child.group)

    def _forward_signals(self) -> None:
        for signum, sender in self._sent.read():
            stat = process_stat(sender)
            child = self._ranks.get(sender if stat is None else stat.session)  # a rank heads its session
            self._tell(Signalled(signum, None if child is None else child.local_rank))

    def _reap(self) -> None:
        self._forward_signals()  # while their senders are known
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while ended := self._endings.next():
            self._reap_one(ended)
        self._sweeper.sweep(len(self._keepers))

    def _reap_one(self, pid: int) -> None:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return
        if reaped == 0:  # a debugger has it
            return
        self._keepers.ended(pid, status, is_expected=self._sweeper.is_active)
        child = self._ranks.pop(pid, None)
        if child is not None:
            self._tell_exit(pid, child, status)

    def _tell_exit(self, pid: int, child: _Child, status: int) -> None:
        exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        at = time.monotonic()
        self._tell(Exited(child.local_rank, child.generation, pid, exit_code, signum, at, child.told))

    def _end(self) -> NoReturn:
        """Kill all descendants and exit: the agent has ended or closed the socket."""
        if self._cgroup:
            cgroup.leave(self._cgroup)
            cgroup.kill(self._cgroup)  # all at once, so that a process that keeps forking cannot escape
        tree.reap_all(self._pid)
        if self._cgroup:
            cgroup.remove(self._cgroup)
        if self._scratch:
            scratch.remove(self._scratch)
        os._exit(0)

    def _tell(self, report: messages.Report) -> None:
        self._outbox.put(report)
        self._flush()

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except OSError:  # the agent has ended: the next read of the socket ends this process
            self._outbox.close()
        self._poll.modify(self._control, select.POLLIN | (0 if self._outbox.is_empty else select.POLLOUT))


def _woken(_signum: int, _frame: Any) -> None:
    """Do nothing: the handler exists so that the signal writes to the wake-up descriptor."""


def _send_signal(pid: int, signum: int, to_group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if to_group or signum == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):  # a new process may have no group of its own yet
                os.killpg(pid, signum)
                return
        os.kill(pid, signum)
