"""One command under watch: stamps from its ranks, the instants at which processes end, and what it all cost.

Theory of operation
-------------------
Ranks write their stamps into a named pipe, whose name is the one thing that reaches them through any launcher
(descriptors do not). Ends of processes come from pidfds. So nothing here polls on a timer, and every instant is
one of CLOCK_MONOTONIC, which all processes of a host share.

The benchmark is a child subreaper: whatever a command leaves behind becomes our child, is killed, reaped and
counted, so no run disturbs the next one and no processor time goes unseen.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

RANK_SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ranks")
_PR_SET_CHILD_SUBREAPER = 36
_SHOWN_OUTPUT = 2000
_LOOK_EVERY_MS = 1


class RunFailed(Exception):
    """This run has no figures; the text says why."""


class Hung(RunFailed):
    pass


@dataclass(frozen=True, slots=True)
class Stamp:
    rank: int
    attempt: int
    pid: int
    event: str
    at: float


def end_once(signum: int, _frame: object) -> None:
    """Leave nothing behind. `timeout` sends its signal twice, and the second would interrupt that."""
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


class WatchedRun:
    """Use as a context: on leaving, nothing of the command is left.

    `folder`: where its pipes are, if their paths must be the same in several runs.
    """

    def __init__(
        self, command: list[str], env: Mapping[str, str], timeout_s: float, folder: str = ""
    ) -> None:
        self._fixed_folder = folder
        self._command = command
        self._env = env
        self._timeout_s = timeout_s
        self.stamps: list[Stamp] = []
        self.ended: dict[int, float] = {}

    def __enter__(self) -> WatchedRun:
        signal.signal(signal.SIGTERM, end_once)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._folder = _folder(self._fixed_folder)
        self._pipe, self._gate = self._fifo("stamps"), self._fifo("gate")
        self._partial = b""
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._pids: dict[int, int] = {}
        env = {**os.environ, **self._env, **names_of_pipes(self._folder.name)}
        self._cpu_before = _cpu_of_children()
        with open(self._path("output"), "wb") as output:
            self.started = time.monotonic()
            self._process = subprocess.Popen(
                self._command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pid = self._process.pid
        self.watch(self.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_everything()
        for fd in (*self._pids, self._pipe, self._gate):
            os.close(fd)
        self._folder.cleanup()

    def watch(self, pid: int) -> None:
        """Note in `ended` when this process ends."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise RunFailed(f"process {pid} ended before it could be watched\n{self._output()}") from None
        self._pids[fd] = pid
        self._poll.register(fd, select.POLLIN)

    def until(self, reached: Callable[[WatchedRun], bool]) -> None:
        """Follow the run to this point; `RunFailed` if it ends or hangs short of it."""
        while not reached(self):
            if self.pid in self.ended:
                raise RunFailed(f"the command ended early (exit code {self._exit_code()})\n{self._output()}")
            left = self.started + self._timeout_s - time.monotonic()
            if left <= 0:
                raise Hung(f"not done after {self._timeout_s:g} s\n{self._output()}")
            for fd, _events in self._poll.poll(left * 1000):
                self._take(fd)

    def says(self, words: str) -> float:
        """Follow the run until its output has these words; when they came."""
        while words not in self._output():
            if self.pid in self.ended or time.monotonic() > self.started + self._timeout_s:
                raise RunFailed(f"it does not say {words!r}\n{self._output()}")
            for fd, _events in self._poll.poll(_LOOK_EVERY_MS):
                self._take(fd)
        return time.monotonic()

    def open_gate(self, ranks: int) -> None:
        os.write(self._gate, b"g" * ranks)

    def mark(self, name: str) -> None:
        """An empty file in the run's folder, where its ranks find it."""
        with open(self._path(name), "w"):
            pass

    def finish(self) -> float:
        """Follow the command to its successful end; the processor seconds of all its processes."""
        self.until(lambda run: run.pid in run.ended)
        self._take(self._pipe)
        code = self._exit_code()
        if code != 0:
            raise RunFailed(f"exit code {code}\n{self._output()}")
        self._end_everything()
        return _cpu_of_children() - self._cpu_before

    def of(self, event: str, attempt: int = 0) -> list[Stamp]:
        return [stamp for stamp in self.stamps if (stamp.event, stamp.attempt) == (event, attempt)]

    def values(self, name: str) -> list[float]:
        """What ranks have stamped as `name=value`."""
        pairs = (stamp.event.partition("=") for stamp in self.stamps)
        return [float(value) for found, _, value in pairs if found == name and value]

    def last(self, event: str, ranks: int, attempt: int = 0) -> float:
        """When the last of all ranks got there."""
        stamps = self.of(event, attempt)
        if len(stamps) != ranks:
            raise RunFailed(f"{len(stamps)} of {ranks} ranks got to {event!r} in attempt {attempt}")
        return max(stamp.at for stamp in stamps)

    def _take(self, fd: int) -> None:
        if fd != self._pipe:
            self.ended[self._pids.pop(fd)] = time.monotonic()
            self._poll.unregister(fd)
            os.close(fd)
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                self._partial += os.read(fd, 1 << 16)
                *lines, self._partial = self._partial.split(b"\n")
                self.stamps += map(_read_stamp, lines)

    def _exit_code(self) -> int:
        return self._process.wait()

    def _end_everything(self) -> None:
        while left := _descendants():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)  # what it leaves becomes our child, and the next look finds it
        self._process.poll()

    def _fifo(self, name: str) -> int:
        path = self._path(name)
        os.mkfifo(path)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder.name, name)

    def _output(self) -> str:
        with open(self._path("output"), "rb") as file:
            return file.read()[-_SHOWN_OUTPUT:].decode(errors="replace")


def names_of_pipes(folder: str) -> dict[str, str]:
    """Return the variables that tell ranks where to write."""
    return {"BENCH_STAMPS": os.path.join(folder, "stamps"), "BENCH_GATE": os.path.join(folder, "gate")}


class _Fixed:
    """A folder of this name, as `tempfile.TemporaryDirectory` makes one of a new name."""

    def __init__(self, name: str) -> None:
        self.name = name
        os.mkdir(name)

    def cleanup(self) -> None:
        shutil.rmtree(self.name)


def _folder(fixed: str) -> _Fixed | tempfile.TemporaryDirectory[str]:
    return _Fixed(fixed) if fixed else tempfile.TemporaryDirectory(prefix="bench-")


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_stamp(line: bytes) -> Stamp:
    rank, attempt, pid, event, at = line.decode().split()
    return Stamp(int(rank), int(attempt), int(pid), event, float(at))
