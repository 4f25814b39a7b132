"""The zygote's loop: reads one socket (agent) and one signal (SIGCHLD). The package docstring explains the design.

The loop never waits for the agent: an `Outbox` of `messages` keeps what the socket does not accept yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import cgroup, messages, scratch, script_start, stack_signal, store, tree
from .contracts import RANK_DIR
from .forking import fork, freeze_garbage
from .messages import (
    Exited,
    Keep,
    KeeperEnded,
    Keeping,
    Learn,
    Learned,
    Ready,
    Signal,
    Signalled,
    Spawn,
    Started,
    SweepDone,
    SweepOrder,
)
from .tree import process_stat

if TYPE_CHECKING:
    import socket

    from .late_variables import LateVariables
    from .learning import Learner, Notes
    from .messages import Report


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
        self._inbox = messages.Inbox(control)
        self._outbox = messages.Outbox(control)
        self._poll = select.poll()
        self._warm = warm and not warm_obstacle
        self._obstacle = warm_obstacle
        self._ranks: dict[int, _Child] = {}
        self._endings = Endings()
        self._keepers = Keepers(self._forget_zygote, self._tell)
        self._sweeper = Sweeper(
            lambda generation, killed: self._tell(SweepDone(generation, killed)), self._ranks.keys
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

            self._learner = Learner()

    def serve(self, cgroup_folder: str, scratch_folder: str) -> None:
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
        self._tell(Ready(self._obstacle))
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
            if self._learner is not None and (names := self._learner.turn()):
                self._tell(Learned(names))
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

    def _obey(self, received: messages.ReceivedFrame) -> str:
        match received.message:
            case Spawn() as order:
                return self._spawn(order, received.fds)
            case Keep() as order:
                self._keep(order)
            case Signal(signum, ranks):
                self._signal(signum, ranks)
            case Learn(names) if self._learner is not None:
                self._learner.learn_beforehand(names)
            case SweepOrder() as order:
                self._keepers.give_up()
                kept = tuple(pid for pid, child in self._ranks.items() if child.local_rank in order.kept)
                self._sweeper.begin(order, kept, len(self._keepers))
        return ""

    def _spawn(self, order: Spawn, fds: tuple[int, ...]) -> str:
        child = _Child(order.local_rank, order.generation, order.has_group)
        notes = None if self._learner is None else self._learner.rank_starts(order.local_rank)
        late = self._late_variables(order.local_rank)
        pid, obstacle = fork()
        if pid == 0:
            with exit_on_error():
                self._forget_zygote()
                self._sent.become_rank(order.env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""))
                become(order, fds, parent=self._pid)
                if not self._warm:
                    execute(order.argv, is_python=order.is_python)
                if order.is_store_kept and order.env.get("RANK") == "0":
                    script_start.join_instead_of_hosting()
                stack_signal.listen()
                script_start.follow_output()
                self.notes, self.late = notes, late
                script_start.enter_debugger()
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
        """Start a store. If nothing here can, reserve the port until rank 0's own store takes it."""
        if self._warm or order.command:
            self._keepers.listen(order._replace(command=()) if self._warm else order)
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
            exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            at = time.monotonic()
            self._tell(Exited(child.local_rank, child.generation, pid, exit_code, signum, at, child.told))

    def _end(self) -> NoReturn:
        """Kill all descendants and exit: the agent has ended or closed the socket. Cleaners end by themselves."""
        if self._cgroup:
            cgroup.leave(self._cgroup, filter(tree.is_cleaner, tree.descendants(self._pid)))
            cgroup.kill(self._cgroup)  # all at once, so that a process that keeps forking cannot escape
        tree.reap_all(self._pid, left_out=tree.is_cleaner)
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


# --- the order in which ranks end ------------------------------------------------------------------
#
# If several ranks have ended since the last look, `waitpid` returns them in the order of their start. The order of
# their ends is evidence: a rank that ended after another one may have lost its connection to it. So the kernel is
# asked twice. A descriptor of a process becomes readable when the process ends, and epoll returns the descriptors in
# that order.


class Endings:
    def __init__(self) -> None:
        self._poll: select.epoll | None = None
        self._pids: dict[int, int] = {}  # by descriptor
        self._ended: list[int] = []  # to be reaped

    def watch(self, pid: int) -> None:
        """Without descriptors of processes (an old kernel, macOS), the order of near ends is that of `waitpid`."""
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(pid)
            self._pids[fd] = pid
            self._poll = self._poll or select.epoll()
            self._poll.register(fd, select.EPOLLIN | select.EPOLLET)

    def _take(self) -> list[int]:
        """Return the processes that have ended since the last call, in the order of their ends."""
        if self._poll is None:
            return []
        ended = []
        for fd, _events in self._poll.poll(0):
            ended.append(self._pids.pop(fd))
            self._poll.unregister(fd)  # closing is not enough: ranks that are being forked have copies
            os.close(fd)
        return ended

    def next(self) -> int:
        """Return the process to reap next: the rank that ended first, or else any other child; 0 if none has ended."""
        if not self._ended:
            self._ended = self._take()
        if not self._ended:
            with contextlib.suppress(ChildProcessError):
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if (
                    found is not None and found.si_pid in self._pids.values()
                ):  # and perhaps another one before it
                    self._ended = self._take()
                if found is not None and not self._ended:
                    return found.si_pid
        return self._ended.pop(0) if self._ended else 0

    def forget(self) -> None:
        """In a forked child."""
        for fd in self._pids:
            os.close(fd)
        if self._poll is not None:
            self._poll.close()


def has_ended(pid: int) -> bool:
    """Whether a child that is not reaped yet has ended, as far as a signal can change it."""
    stat = process_stat(pid)
    return stat is None or stat.is_exiting


# --- signals that are sent to the zygote -----------------------------------------------------------
#
# The signals that the zygote gets in the place of the agent: from its ranks, or as one of all processes of a job.
#
# Under torchrun, the parent of a rank is the launcher, and a rank that sends SIGTERM to its parent stops the job.
# Here its parent is the zygote. None of these signals ends it: it reads them from a descriptor, together with their
# sender.

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(signal.Signals[name] for name in _NAMES)
_SIZE_OF_SET, _SIZE_OF_REPORT = 128, 128
_NUMBER_ERRNO_CODE_SENDER = struct.Struct("=IiiI")  # the first fields of the kernel's struct signalfd_siginfo


class SentSignal(NamedTuple):
    signum: int
    sender: int


class SentSignals:
    """They are blocked as well as ignored, so that a signal for a rank that is being forked is not lost."""

    def __init__(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._answers = {each: signal.signal(each, signal.SIG_IGN) for each in _SIGNALS}
        self.fd = _signalfd()

    def read(self) -> list[SentSignal]:
        """Return those that processes have sent: what a terminal sends, it sends to the agent too."""
        found = []
        while self.fd >= 0:
            try:
                report = os.read(self.fd, _SIZE_OF_REPORT)
            except BlockingIOError:
                break
            signum, _errno, code, sender = _NUMBER_ERRNO_CODE_SENDER.unpack_from(report)
            if code <= 0:
                found.append(SentSignal(signum, sender))
        return found

    def become_rank(self, handled_by_launcher: str) -> None:
        """Hear them again. A program that torchrun starts ignores none that torchrun handles, also under nohup."""
        if self.fd >= 0:
            os.close(self.fd)
        for signum, answer in self._answers.items():
            if answer is signal.SIG_IGN and signum.name in handled_by_launcher.split(","):
                answer = signal.default_int_handler if signum is signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, answer)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _signalfd() -> int:
    bits = sum(1 << (each - 1) for each in _SIGNALS)
    wanted = ctypes.create_string_buffer(bits.to_bytes(_SIZE_OF_SET, "little"), _SIZE_OF_SET)
    return int(ctypes.CDLL(None).signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC))


# --- the processes that keep stores ----------------------------------------------------------------
#
# One for each generation, as the zygote starts and ends them (`store`).
#
# The socket of a store listens before the answer to the agent. So ranks can connect from then on, and the kernel lets
# them wait. The process that serves it is forked behind the first rank of its generation on this node: a fork of the
# zygote takes some milliseconds, and a rank needs more than that before it connects. If no rank is started soon, the
# process is forked all the same: ranks of other nodes connect as well, and ranks that have kept their processes.

_WAIT_FOR_RANK_S = 0.005  # a service in the agent answers within 2 to 4 ms


class _Keeper(NamedTuple):
    generation: int
    error: int  # read end of the pipe to which it writes its last error


class _Listening(NamedTuple):
    """A store that no process serves yet."""

    sock: socket.socket
    order: Keep
    due_at: float


def bound(order: Keep, *, is_kept: bool) -> tuple[socket.socket | None, Keeping]:
    """Return the socket of a store and the answer to the agent. `is_kept`: a process of the zygote will serve it."""
    try:
        sock = store.bound_socket(order.host, order.port, listen=is_kept)
    except OSError as error:
        return None, Keeping(order.generation, 0, is_kept, error=str(error.strerror))
    return sock, Keeping(order.generation, sock.getsockname()[1], is_kept)


class Keepers:
    """`become_child` is called first in each fork."""

    def __init__(self, become_child: Callable[[], None], tell: Callable[[Report], None]) -> None:
        self._become_child, self._tell = become_child, tell
        self._pid = os.getpid()
        self._running: dict[int, _Keeper] = {}
        self._listening: list[_Listening] = []

    def __len__(self) -> int:
        return len(self._running)

    def listen(self, order: Keep) -> None:
        """Open the socket of a store, and tell its port."""
        if order.port:
            self._end()  # keepers may hold the requested port until then
        sock, answer = bound(order, is_kept=True)
        if sock is not None:
            self._listening.append(_Listening(sock, order, time.monotonic() + _WAIT_FOR_RANK_S))
        self._tell(answer)

    def rank_started(self) -> None:
        """The first rank has been forked, or another one: nothing waits any more."""
        while self._listening:
            self._fork(self._listening.pop(0))

    def wait_s(self) -> float | None:
        """The time until a store must be served, although no rank was started; None if there is none."""
        return max(0.0, self._listening[0].due_at - time.monotonic()) if self._listening else None

    def turn(self) -> None:
        while self.wait_s() == 0.0:
            self._fork(self._listening.pop(0))

    def _fork(self, each: _Listening) -> None:
        sock, order = each.sock, each.order
        error, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid, obstacle = fork()
        if pid == 0:
            with exit_on_error():
                self._become_child()
                tree.die_with_parent(self._pid)
                if order.command:
                    _execute_keeper(order, sock.detach(), write)
                store.keep(sock, order.host, write)
        sock.close()
        os.close(write)
        if obstacle:
            os.close(error)
            self._tell(KeeperEnded(order.generation, f"its process cannot be started: {obstacle}"))
            return
        self._running[pid] = _Keeper(order.generation, error)

    def give_up(self) -> None:
        """Close the sockets that no process serves: the world is over. A sweep ends the processes."""
        for each in self._listening:
            each.sock.close()
        self._listening.clear()

    def _end(self) -> None:
        self.give_up()
        for pid, keeper in self._running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(keeper.error)
        self._running.clear()

    def ended(self, pid: int, status: int, is_expected: bool) -> None:
        """The loop has waited for this child, whatever it was."""
        keeper = self._running.pop(pid, None)
        if keeper is None:
            return
        reason = os.read(keeper.error, 4096).decode(errors="replace")
        os.close(keeper.error)
        has_torch = not os.WIFEXITED(status) or os.WEXITSTATUS(status) != store.NO_TORCH
        if has_torch and not is_expected:
            self._tell(KeeperEnded(keeper.generation, reason or _in_words(status)))

    def forget(self) -> None:
        """Close the descriptors, in a fork of the zygote."""
        self.give_up()
        for keeper in self._running.values():
            os.close(keeper.error)


def _execute_keeper(order: Keep, sock: int, error: int) -> NoReturn:
    for fd in (sock, error):
        os.set_inheritable(fd, True)
    os.execv(order.command[0], (*order.command, str(sock), order.host, str(error)))


def _in_words(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(number, f'signal {number}')}"


# --- what ended ranks leave behind -----------------------------------------------------------------
#
# Kills the processes that ended ranks have left behind, and spares those of ranks that continue.
#
# A sweep ends when nothing is left that it has to end. A process in a session of its own was made to survive its
# rank: it may still save what the rank has sent it, so it has some time. The processes by which multiprocessing and
# torch remove semaphores and shared memory are left alone: they end by themselves when no process uses these any more.
#
# If ranks keep their processes over a failure (they are *kept*), the sweep must not touch anything of theirs. A
# process belongs to a kept rank if it is below it, or in its session. What remains are processes in sessions of their
# own whose parents have ended: the kernel no longer tells who started them. Two traces may show it: the log folder of
# a rank in the environment, and the standard streams, which each rank has of its own. Without a trace the process is
# spared, because to end the helper of a healthy rank is the worse error. The next sweep without kept ranks ends it.
#
# Kept ranks wait for the end of a sweep. So with them it does not wait for the processes that have some time, and
# ends these later.

_Trace = str | tuple[int, int]  # a log folder, or device and inode of a stream


class Sweeper:
    """`over` receives the generation, and how many processes were left when the sweep began.

    `ranks` returns the pids of all ranks that live.
    """

    def __init__(self, over: Callable[[int, int], None], ranks: Callable[[], Iterable[int]]) -> None:
        self._over, self._ranks = over, ranks
        self._pid = os.getpid()
        self._sessions = {self._pid}  # of the zygote and its ranks: others were opened to survive them
        self._traces: dict[_Trace, int] = {}  # the rank (pid) that had it
        self._order: SweepOrder | None = None
        self._kept: frozenset[int] = frozenset()
        self._has_detached = False  # a sweep with kept ranks has left some, to be ended later
        self._spare_until = 0.0  # by then, detached processes have ended by themselves or are killed
        self._left_over = 0

    def rank_started(self, pid: int, order: Spawn, traces: Collection[_Trace]) -> None:
        self._sessions.add(pid)
        self._traces |= dict.fromkeys((*traces, *filter(None, (order.env.get(RANK_DIR),))), pid)

    @property
    def is_active(self) -> bool:
        return self._order is not None

    @property
    def is_due(self) -> bool:
        return (self.is_active or self._has_detached) and time.monotonic() >= self._spare_until

    def wait_s(self) -> float | None:
        """The time until it is due. None: only the end of a process lets it continue."""
        left_s = self._spare_until - time.monotonic()
        return left_s if (self.is_active or self._has_detached) and left_s > 0 else None

    def begin(self, order: SweepOrder, kept: tuple[int, ...], unawaited: int) -> None:
        """`kept`: the pids of the ranks that continue. `unawaited`: how many keep stores."""
        self._order, self._kept, self._has_detached = order, frozenset(kept), False
        self._spare_until = time.monotonic() + order.patience_s
        self._left_over = len(tree.descendants(self._pid, self._is_left_out)) - unawaited
        self.sweep(unawaited)

    def sweep(self, unawaited: int) -> None:
        """Kill what is left. The end of each child calls this again, until nothing is left.

        This kills keepers of stores and trial imports too, but does not wait for them: the next store has its own port.
        """
        if self._order is None:
            return self._end_detached()
        spared: frozenset[int] = frozenset()
        if time.monotonic() < self._spare_until:
            spared = tree.in_other_sessions(self._pid, self._sessions)
        left = tree.kill_all(self._pid, spared, self._is_left_out)
        detached = self._among(spared) if self._kept else []
        if left - len(detached) > unawaited:
            return
        generation, self._order = self._order.generation, None
        self._has_detached = bool(detached)
        self._sessions = {self._pid, *self._kept}
        self._forget_traces()
        self._over(generation, self._left_over)

    def _end_detached(self) -> None:
        """Kill the processes that have had their time. The ranks that have started meanwhile are kept too."""
        if not self._has_detached or time.monotonic() < self._spare_until:
            return
        self._kept = frozenset(self._ranks())
        late = self._among(tree.in_other_sessions(self._pid, self._sessions))
        for pid in late:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._has_detached = bool(late)
        self._forget_traces()

    def _among(self, pids: frozenset[int]) -> list[int]:
        """Return those of these processes that are to end."""
        found = tree.descendants(self._pid, self._is_left_out) if pids else []
        return [pid for pid in found if pid in pids]

    def _forget_traces(self) -> None:
        if not self._has_detached:
            self._traces = {trace: pid for trace, pid in self._traces.items() if pid in self._kept}

    def _is_left_out(self, pid: int) -> bool:
        return self._belongs_to_kept(pid) or tree.is_cleaner(pid)

    def _belongs_to_kept(self, pid: int) -> bool:
        """Whether a process belongs to a kept rank, as far as this does not follow from its parent.

        It is asked while the processes are listed: a kept rank may start another one at any moment.
        """
        if not self._kept:
            return False
        stat = process_stat(pid)
        if pid in self._kept or stat is None or stat.session in self._kept:
            return True
        if stat.session in self._sessions or stat.parent != self._pid:
            return False
        owners = {self._traces[trace] for trace in _traces_of(pid) if trace in self._traces}
        return not owners or any(owner in self._kept for owner in owners)


def traces_of_streams(fds: tuple[int, ...]) -> tuple[_Trace, ...]:
    return tuple((stat.st_dev, stat.st_ino) for stat in map(os.fstat, fds))


def _traces_of(pid: int) -> set[_Trace]:
    found: set[_Trace] = set()
    for fd in (0, 1, 2):
        with suppress(OSError):
            stat = os.stat(f"/proc/{pid}/fd/{fd}")
            found.add((stat.st_dev, stat.st_ino))
    wanted = f"{RANK_DIR}=".encode()
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        of_interest = (each for each in file.read().split(b"\0") if each.startswith(wanted))
        found |= {os.fsdecode(each[len(wanted) :]) for each in of_interest}
    return found


# --- a fork becomes a rank -------------------------------------------------------------------------
#
# Turns a fresh fork of the zygote into a rank: its session, its streams, its environment.

_CANNOT_EXECUTE = 126
_NOT_FOUND = 127
_INTERNAL = 70
_INTERRUPTED = 130


def become(order: Spawn, fds: tuple[int, ...], parent: int) -> None:
    os.setsid()
    tree.die_with_parent(parent)
    tree.allow_tracing_by_agent(parent)
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    renew_streams()
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    for name, value in order.env.items():
        os.environ[name] = value
    if order.args:
        sys.argv[-len(order.args) :] = order.args
        sys.orig_argv[-len(order.args) :] = order.args
    script_start.keep_from_keyboard(order.env)
    _fresh_identity()


def renew_streams() -> None:
    """Open streams as the interpreter has opened them, which was for descriptors of another kind.

    A text stream remembers whether its file has positions. The one of a command's file would ask a pipe for it when the
    script changes its encoding, and fail.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        _renew_stream(name, fd)


def _renew_stream(name: str, fd: int) -> None:
    old = getattr(sys, name)
    if not isinstance(old, io.TextIOWrapper) or old.seekable() == _has_positions(fd):
        return
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    new = io.TextIOWrapper(
        raw,  # with -u, the interpreter has no buffer between the two
        old.encoding,
        old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    new.mode = "w"  # type: ignore[misc]
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _has_positions(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def execute(argv: tuple[str, ...], *, is_python: bool) -> NoReturn:
    if is_python:
        script_start.announce()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        _die(
            f"cannot start {argv[0]}: the program is not on PATH; check the name, or use the full path",
            _NOT_FOUND,
        )
    except OSError as error:
        _die(f"cannot start {argv[0]}: {error.strerror}", _CANNOT_EXECUTE)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit on an error: a child that fails before it is a rank must not continue as a second zygote."""
    try:
        yield
    except KeyboardInterrupt:  # the job ends before this rank has begun
        os._exit(_INTERRUPTED)
    except BaseException as error:
        _die(f"a rank could not be started: {type(error).__name__}: {error}", _INTERNAL)


def _fresh_identity() -> None:
    """Create per-process state again (random seeds, PID caches); the standard library handles the rest after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    threads = sys.modules.get("threading")
    if threads is not None:
        threads.main_thread()._native_id = threads.get_native_id()


def _die(text: str, code: int) -> NoReturn:
    os.write(2, f"ddp-launch: {text}\n".encode(errors="surrogateescape"))
    os._exit(code)
