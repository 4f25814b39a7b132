"""`torch.distributed.elastic.timer`: a rank sets a timer for an operation; the agent kills it if the timer expires.

The protocol is torchrun's: a named pipe, into which a rank writes a line of JSON for each timer that begins or ends.
Unlike torchrun's agent, this agent does not end itself together with the rank. The rank has failed, and the usual
failure handling follows.

The agent opens a pidfd at the first timer of a process, so that it never signals a different process with a reused PID.
The process must be below the zygote, because a PID from inside a container can belong to another process on the
host. A timer wakes the agent once, when it expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from launcher.failure.verdict import signal_name
from launcher.output.lines import printable
from launcher.template import scratch, tree
from launcher.template.tree import process_stat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_READ = 1 << 16  # a line is at most PIPE_BUF: 4096
_LONGEST_S = 1e9
_LOOK_AGAIN_S, _LOOKS = 0.25, 20


class Timer(NamedTuple):
    pid: int
    scope: str  # the timer's name
    ends_at: float  # wall-clock time; below 0: the timer has ended
    signum: int  # 0: report only, without a signal

    @property
    def in_words(self) -> str:
        action = f"; its process got {signal_name(self.signum)}" if self.signum else ""
        return f'timer "{printable(self.scope)}" (torch.distributed.elastic.timer) expired{action}'


def parse_line(line: bytes) -> Timer | None:
    """Return None if the line does not have the format of torch's timer client."""
    try:
        content = json.loads(line)
        pid, ends_at, asked = int(content["pid"]), float(content["expiration_time"]), int(content["signal"])
        signum = signal.Signals(asked) if asked > 0 else 0
        return Timer(pid, str(content["scope_id"]), ends_at, signum) if pid > 0 else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


@dataclass(slots=True)
class _Process:
    fd: int
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)


class RankTimers:
    """The timers of this node's ranks. `expired` receives each expired timer before its process gets a signal.

    `rank_pids` returns the processes of the ranks that live.
    """

    def __init__(
        self, path: str, expired: Callable[[Timer], None], rank_pids: Callable[[], Iterable[int]]
    ) -> None:
        """Raise `OSError` if the pipe cannot be created. An existing pipe is from an earlier run and is replaced."""
        self._path, self._expired, self._rank_pids = path, expired, rank_pids
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _Process] = {}
        self._unknown: dict[
            tuple[int, str], asyncio.TimerHandle
        ] = {}  # timers of processes that may be found later
        scratch.ensure(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.lstat(path).st_mode):
                os.unlink(path)
        os.mkfifo(path, 0o600)
        # The agent also opens the pipe for writing, so that it never reaches the end of the stream.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self._loop.add_reader(self._fd, self._listen)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        for pid in list(self._processes):
            self._forget(pid)
        for waiting in self._unknown.values():
            waiting.cancel()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _listen(self) -> None:
        *lines, rest = (self._rest + os.read(self._fd, _READ)).split(b"\n")
        self._rest = rest[-_READ:]
        for line in lines:
            timer = parse_line(line)
            if timer is not None:
                self._note(timer)

    def _note(self, timer: Timer, looks: int = _LOOKS) -> None:
        process = self._processes.get(timer.pid)
        if process is not None and (begun := process.timers.pop(timer.scope, None)):
            begun.cancel()
        if (waiting := self._unknown.pop((timer.pid, timer.scope), None)) is not None:
            waiting.cancel()
        if timer.ends_at < 0:
            return
        if process is not None or self._found(timer.pid):
            self._begin(timer)
        elif looks:  # the pipe may be faster than the zygote's report that a rank has started
            again = self._loop.call_later(_LOOK_AGAIN_S, self._note, timer, looks - 1)
            self._unknown[timer.pid, timer.scope] = again

    def _found(self, pid: int) -> bool:
        # Their parent is the zygote. It need not be a child of this process: see `launcher.warm_pool`.
        stats = [process_stat(each) for each in self._rank_pids()]
        roots = {os.getpid(), *(stat.parent for stat in stats if stat is not None)}
        if all(pid not in tree.descendants(root) for root in roots):
            return False
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False  # the process has ended
        self._processes[pid] = _Process(fd)
        self._loop.add_reader(fd, self._forget, pid)  # called when it ends
        return True

    def _begin(self, timer: Timer) -> None:
        in_s = min(max(0.0, timer.ends_at - time.time()), _LONGEST_S)
        handle = self._loop.call_later(in_s, self._expire, timer)
        self._processes[timer.pid].timers[timer.scope] = handle

    def _expire(self, timer: Timer) -> None:
        process = self._processes[timer.pid]
        del process.timers[timer.scope]
        self._expired(timer)
        if timer.signum:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process.fd, timer.signum)

    def _forget(self, pid: int) -> None:
        process = self._processes.pop(pid)
        self._loop.remove_reader(process.fd)
        os.close(process.fd)
        for handle in process.timers.values():
            handle.cancel()
