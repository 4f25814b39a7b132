"""Rank output through real pipes, files, terminals and processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from launched import SOON_S, eventually

from launcher.output.logs import LogPump, RankLabel
from launcher.output.terminal import Terminal as Output
from launcher.settings.spec import LogSpec, StreamChoice, Streams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def label(rank: int = 0, generation: int = 0) -> RankLabel:
    return RankLabel("n0", rank, rank, "default", generation)


class Reader:
    """Collects what comes out of a descriptor, until its end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.data = b""
        self._grew = threading.Condition()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # a terminal whose other end closed
            while chunk := os.read(self.fd, 65536):
                with self._grew:
                    self.data += chunk
                    self._grew.notify_all()

    def wait_for(self, text: bytes) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: text in self.data, 60), (text, self.data[-500:])

    def all(self) -> bytes:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.data


class Screen:  # a pump between two pipes and a directory
    def __init__(self, tmp_path: Path, log: LogSpec, file_limit: int = 0) -> None:
        out, out_fd = os.pipe()
        err, err_fd = os.pipe()
        self.directory = tmp_path / "logs"
        self.pump = LogPump(log, str(self.directory), out_fd, err_fd, file_limit)
        self.out_fd, self.err_fd = out_fd, err_fd
        self.out, self.err = Reader(out), Reader(err)
        self._fds = [out, out_fd, err, err_fd]

    def write(self, rank: int, out: bytes = b"", err: bytes = b"", generation: int = 0) -> None:
        out_fd, err_fd = self.pump.open_rank(label(rank, generation))
        for fd, data in ((out_fd, out), (err_fd, err)):
            if data:
                write_all(fd, data)
            os.close(fd)

    def end(self) -> tuple[bytes, bytes]:
        self.pump.close(SOON_S)
        os.close(self.out_fd)
        os.close(self.err_fd)
        return self.out.all(), self.err.all()

    def file(self, rank: int, name: str, generation: int = 0) -> bytes:
        return (self.directory / f"generation_{generation}" / f"rank_{rank}" / name).read_bytes()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def is_drained(pump: LogPump, generation: int) -> bool:
    """Every pipe of the generation has ended and its lines were written; the pump's thread answers."""
    answer: Future[bool] = Future()

    def look() -> None:
        ended = all(stream.label.generation != generation for stream in pump._streams.values())
        answer.set_result(ended and all(terminal.is_idle for terminal in pump._terminals))

    pump._ask(look)
    return answer.result(SOON_S)


def await_drained(pump: LogPump, generation: int) -> None:
    eventually(lambda: is_drained(pump, generation), what="the pipes have ended")


@pytest.fixture
def ends() -> Iterator[list[int]]:
    fds: list[int] = []  # to close at the end of a test, whatever happened
    yield fds
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_lines_are_prefixed_and_files_are_raw(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec())
    screen.write(3, out=b"a\r\nb\xff\nlast", err=b"oops\n")
    await_drained(screen.pump, 0)
    assert screen.pump.rank_directory(label(3)) == str(screen.directory / "generation_0/rank_3")
    assert screen.end() == (b"[n0:3] a\r\n[n0:3] b\xff\n[n0:3] last", b"[n0:3] oops\n")
    assert screen.file(3, "stdout.log") == b"a\r\nb\xff\nlast"
    assert screen.file(3, "stderr.log") == b"oops\n"


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec(stdout_filters=("x",)))
    screen.write(0, out=b"x\n")
    screen.end()
    paths = [screen.directory, *screen.directory.rglob("*")]
    assert len(paths) == 6
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_lines_of_many_ranks_on_one_pipe_are_never_mixed(tmp_path: Path) -> None:
    source, sink = os.pipe()
    pump = LogPump(LogSpec(), str(tmp_path), sink, sink)
    reader = Reader(source)

    def rank(n: int, fds: tuple[int, int]) -> None:
        for i in range(300):
            line = b"%d-%d-" % (n, i) + b"x" * (i % 50) * 7
            for fd in fds:
                os.write(fd, line[: i % 11])
                os.write(fd, line[i % 11 :] + b".\n")
        for fd in fds:
            os.close(fd)

    threads = [threading.Thread(target=rank, args=(n, pump.open_rank(label(n)))) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        pump.say("from the launcher")
    for thread in threads:
        thread.join()
    await_drained(pump, 0)
    pump.close(SOON_S)
    os.close(sink)
    lines = reader.all().splitlines()
    os.close(source)
    assert lines.count(b"from the launcher") == 50
    wanted = sorted(
        b"[n0:%d] %d-%d-%s." % (n, n, i, b"x" * (i % 50) * 7)
        for n in range(4)
        for i in range(300)
        for _ in range(2)
    )
    assert sorted(line for line in lines if line != b"from the launcher") == wanted


def test_no_colour_in_a_pipe_unless_asked_for(tmp_path: Path) -> None:
    for color, has_escape in (("auto", False), ("never", False), ("always", True)):
        screen = Screen(tmp_path / color, LogSpec(color=color))
        screen.write(0, out=b"x\n")
        assert (b"\x1b[" in screen.end()[0]) is has_escape


def test_redirected_streams_and_filtered_ranks_go_to_their_files_only(tmp_path: Path) -> None:
    log = LogSpec(redirects=StreamChoice(Streams.NONE, ((1, Streams.OUT),)), local_ranks_filter=(0, 1))
    screen = Screen(tmp_path, log)
    for rank in range(3):
        screen.write(rank, out=b"out\n", err=b"err\n")
    await_drained(screen.pump, 0)
    out, err = screen.end()
    assert out == b"[n0:0] out\n"
    assert sorted(err.splitlines()) == [b"[n0:0] err", b"[n0:1] err"]
    for rank in range(3):
        assert screen.file(rank, "stdout.log") == b"out\n"


def test_filters_duplicate_matching_lines_of_all_ranks(tmp_path: Path) -> None:
    log = LogSpec(stdout_filters=("apple", "über"), local_ranks_filter=(0, 1), color="always")
    screen = Screen(tmp_path, log)
    for rank in range(3):
        screen.write(rank, out="an apple\nnothing\nüber\n".encode(), err=b"apple\n")
        await_drained(screen.pump, 0)
    out, _ = screen.end()
    assert out.count(b"nothing") == 2  # the terminal gets every line
    filtered = (screen.directory / "generation_0/filtered_stdout.log").read_text()
    assert filtered == "".join(f"[n0:{r}] an apple\n[n0:{r}] über\n" for r in range(2))
    assert not (screen.directory / "generation_0/filtered_stderr.log").exists()


def test_tails_outlive_the_rank_and_are_bounded(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec())
    text = b"".join(b"%d\n" % i for i in range(100_000))
    screen.write(2, out=b"hello\n", err=text)
    await_drained(screen.pump, 0)
    assert screen.pump.stderr_tail(2, 0) == text[-65536:]
    assert screen.pump.stderr_tail(7, 0) == b""
    for generation in (1, 2):
        screen.write(2, generation=generation)
    assert screen.pump.stderr_tail(2, 0) == b""  # two generations are kept
    screen.end()


@pytest.mark.parametrize(
    "rest",
    [b"  frame\n" * 50_000 + b"ValueError: deep\n", b"ValueError: " + b"a" * 500_000 + b"\n"],
    ids=["many frames", "long message"],
)
def test_a_traceback_longer_than_the_tail_keeps_its_beginning(tmp_path: Path, rest: bytes) -> None:
    screen = Screen(tmp_path, LogSpec())
    begins = b"Traceback (most recent call last):\n"
    screen.write(0, err=b"warming up\n" * 9000 + begins + rest)
    await_drained(screen.pump, 0)
    assert screen.pump.stderr_tail(0, 0).startswith(begins + rest[:5000])
    assert len(screen.pump.stderr_tail(0, 0)) < 80_000
    screen.write(1, err=begins + b"  frame\n" * 50_000 + b"10%\r" * 50_000)
    await_drained(screen.pump, 0)
    assert begins not in screen.pump.stderr_tail(1, 0)  # survived: a progress bar ran since
    screen.end()


def test_a_leaked_pipe_does_not_hang_the_end_and_its_last_words_are_shown(
    tmp_path: Path, ends: list[int]
) -> None:
    screen = Screen(tmp_path, LogSpec())
    out_fd, err_fd = screen.pump.open_rank(label())
    ends.append(out_fd)
    os.write(out_fd, b"no newline")
    os.close(err_fd)
    assert screen.end() == (b"[n0:0] no newline", b"")


def test_who_outlives_two_generations_loses_its_pipe(tmp_path: Path, ends: list[int]) -> None:
    screen = Screen(tmp_path, LogSpec())
    leaked = screen.pump.open_rank(label(0, 0))
    ends += leaked
    screen.write(0, generation=2)
    await_drained(screen.pump, 2)
    await_drained(screen.pump, 0)
    with pytest.raises(BrokenPipeError):
        os.write(leaked[0], b"x")
    screen.end()


def test_a_rank_that_keeps_its_process_keeps_its_files_and_gets_its_new_label(
    tmp_path: Path, ends: list[int]
) -> None:
    screen = Screen(tmp_path, LogSpec(stdout_filters=("apple",)))
    kept = screen.pump.open_rank(label(1, 0))
    ends += kept
    os.write(kept[0], b"an apple\n")
    os.write(kept[1], b"Traceback (most recent call last):\nValueError: of the last generation\n")
    screen.err.wait_for(b"of the last")
    for generation in (1, 2, 3):  # a new rank takes its number: it is now rank 0
        before = label(1, 0) if generation == 1 else replace(label(1, generation - 1), rank=0)
        after = replace(label(1, generation), rank=0)
        screen.pump.carry_over([(before, after)])
        assert is_drained(screen.pump, 9)  # the pump has the new label
        screen.write(1, out=b"new\n", generation=generation)
        os.write(kept[0], b"apple %d\n" % generation)
        screen.out.wait_for(b"[n0:0] apple %d\n" % generation)
    assert screen.pump.stderr_tail(0, 3) == b""  # an older traceback is not that of a later failure
    os.write(kept[1], b"KeyError: 5\n")
    screen.err.wait_for(b"[n0:0] KeyError: 5\n")
    assert screen.pump.stderr_tail(0, 3) == b"KeyError: 5\n"
    assert screen.file(1, "stdout.log", 0) == b"an apple\napple 1\napple 2\napple 3\n"
    assert os.readlink(screen.directory / "generation_3/rank_0") == "../generation_0/rank_1"
    assert screen.file(0, "stdout.log", 3) == screen.file(1, "stdout.log", 0)
    assert screen.file(1, "stdout.log", 3) == b"new\n"
    for fd in kept:
        os.close(fd)
    ends.clear()
    screen.end()
    assert (screen.directory / "generation_2/filtered_stdout.log").read_text() == "[n0:0] apple 2\n"


def test_restarts_leak_no_descriptor(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec(stdout_filters=("x",)))
    counts = []
    for generation in range(60):
        screen.write(0, out=b"x\n", generation=generation)
        await_drained(screen.pump, generation)
        counts.append(len(os.listdir("/proc/self/fd")))
    # Other threads of this process may have a file open for a moment. What leaks stays.
    eventually(
        lambda: len(os.listdir("/proc/self/fd")) <= max(counts[:5]), what=f"no more than at first: {counts}"
    )
    screen.end()


@pytest.mark.parametrize("gone", ["pipe", "terminal"])
def test_a_terminal_that_goes_away_does_not_end_the_job(tmp_path: Path, gone: str) -> None:
    source, sink = os.pipe() if gone == "pipe" else pty.openpty()
    pump = LogPump(LogSpec(), str(tmp_path), sink, sink)
    os.close(source)
    for rank in range(2):
        out_fd, err_fd = pump.open_rank(label(rank))
        os.write(out_fd, b"still here\n")
        os.close(out_fd)
        os.close(err_fd)
        await_drained(pump, 0)
    pump.say("nobody reads this")
    pump.close(SOON_S)
    os.close(sink)
    for rank in range(2):
        assert (tmp_path / f"generation_0/rank_{rank}/stdout.log").read_bytes() == b"still here\n"


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.close(source)
    os.close(sink)
    pump = LogPump(LogSpec(), str(tmp_path), sink, sink)
    out_fd, err_fd = pump.open_rank(label())
    os.write(out_fd, b"x\n")
    os.close(out_fd)
    os.close(err_fd)
    await_drained(pump, 0)
    pump.close(SOON_S)


def test_the_users_description_stays_blocking(tmp_path: Path, ends: list[int]) -> None:
    for pair in (os.pipe(), pty.openpty()):
        ends += pair
        pump = LogPump(LogSpec(), str(tmp_path), pair[1], pair[1])
        pump.say("x")
        pump.close(SOON_S)
        assert not fcntl.fcntl(pair[1], fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_socket_is_relayed_to(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pump = LogPump(LogSpec(), str(tmp_path), theirs.fileno(), theirs.fileno())
        out_fd, err_fd = pump.open_rank(label())
        os.write(out_fd, b"through a socket\n")
        os.close(out_fd)
        os.close(err_fd)
        await_drained(pump, 0)
        pump.close(SOON_S)
        assert ours.recv(1000) == b"[n0:0] through a socket\n"


class Terminal:
    """A pseudo-terminal of 40 columns that translates nothing."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        mode = termios.tcgetattr(self.slave)
        mode[1] &= ~termios.OPOST
        termios.tcsetattr(self.slave, termios.TCSANOW, mode)
        termios.tcsetwinsize(self.slave, (24, 40))
        self.reader = Reader(self.master)

    def end(self) -> bytes:
        os.close(self.slave)
        data = self.reader.all()
        os.close(self.master)
        return data


def test_the_status_row_is_wiped_before_lines_and_redrawn_below(tmp_path: Path) -> None:
    terminal = Terminal()
    pump = LogPump(LogSpec(color="never"), str(tmp_path), terminal.slave, terminal.slave)
    pump.progress("step 1 " + "." * 60)
    row = b"step 1 " + b"." * 28  # cut to the width
    terminal.reader.wait_for(row)
    out_fd, err_fd = pump.open_rank(label())
    os.write(out_fd, b"hello\n")
    wipe = b"\r\x1b[K"
    terminal.reader.wait_for(row + wipe + b"[n0:0] hello\n" + row)
    os.close(out_fd)
    os.close(err_fd)
    pump.close(SOON_S)
    assert terminal.end() == row + wipe + b"[n0:0] hello\n" + row + wipe


@pytest.mark.parametrize("no_color", ["", "1"])
def test_prefixes_are_coloured_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    pump = LogPump(LogSpec(), str(tmp_path), terminal.slave, terminal.slave)
    out_fd, err_fd = pump.open_rank(label())
    os.write(out_fd, b"hello\n")
    os.close(out_fd)
    os.close(err_fd)
    pump.close(SOON_S)
    assert terminal.end() == (b"[n0:0] hello\n" if no_color else b"\x1b[36m[n0:0] \x1b[0mhello\n")


def test_a_stopped_terminal_does_not_stop_the_ranks(tmp_path: Path) -> None:
    terminal = Terminal()  # stopped as ^S does
    pump = LogPump(LogSpec(), str(tmp_path), terminal.slave, terminal.slave)
    termios.tcflow(terminal.slave, termios.TCOOFF)
    out_fd, err_fd = pump.open_rank(label())
    write_all(out_fd, b"y" * 99 * 50_000 + b"\n")
    os.close(out_fd)
    os.close(err_fd)
    log = tmp_path / "generation_0/rank_0/stdout.log"
    eventually(lambda: log.stat().st_size == 99 * 50_000 + 1, what="the last of it is read from the pipe")
    assert not is_drained(pump, 0)
    termios.tcflow(terminal.slave, termios.TCOON)
    await_drained(pump, 0)
    pump.close(SOON_S)
    assert b"not shown here" in terminal.end()


def test_progress_is_nothing_without_a_terminal(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec())
    screen.pump.progress("step 1")
    screen.pump.say("said")
    assert screen.end() == (b"", b"said\n")


def test_a_bar_is_shown_as_it_is_and_ended_by_lines_of_others(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec())
    ends = [fd for rank in (0, 1) for fd in screen.pump.open_rank(label(rank))]
    os.write(ends[1], b"\r1%")
    screen.err.wait_for(b"[n0:0] \r1%")
    os.write(ends[3], b"line\n")
    screen.err.wait_for(b"\n[n0:1] line\n")
    os.write(ends[1], b"\r2%\n")
    for fd in ends:
        os.close(fd)
    assert screen.end()[1] == b"[n0:0] \r1%\n[n0:1] line\n[n0:0] \r2%\n"


def test_a_quiet_progress_bar_is_shown_when_it_is_due(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec())
    out_fd, err_fd = screen.pump.open_rank(label())
    os.write(err_fd, b"\r1%")
    screen.err.wait_for(b"[n0:0] \r1%")
    os.write(err_fd, b"\r2%")
    screen.err.wait_for(b"\r2%")
    os.close(out_fd)
    os.close(err_fd)
    assert screen.end() == (b"", b"[n0:0] \r1%\r2%\n")


def test_files_are_rotated_at_their_limit(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec(), file_limit=100_000)
    text = b"".join(b"%d\n" % i for i in range(200_000))
    screen.write(0, out=text)
    screen.end()
    old, new = screen.file(0, "stdout.log.1"), screen.file(0, "stdout.log")
    assert text.endswith(old + new)
    assert 0 < len(new) <= 100_000
    assert 0 < len(old) <= 100_000


def test_an_unwritable_directory_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    screen = Screen(tmp_path, LogSpec())
    for rank in range(3):
        screen.write(rank, out=b"x\n")
    await_drained(screen.pump, 0)
    out, err = screen.end()
    assert out.count(b"x\n") == 3
    assert err.count(b"cannot write") == len(err.splitlines()) == 1


def test_a_full_disk_is_told_once_and_the_terminal_goes_on(tmp_path: Path) -> None:
    """A file size limit fails writes as a full disk does; SIGXFSZ would come first."""
    screen = Screen(tmp_path, LogSpec())
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for rank in range(2):
            screen.write(rank, out=b"line\n" * 100_000)
        await_drained(screen.pump, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    out, err = screen.end()
    assert out.count(b"line\n") == 200_000
    assert len(err.splitlines()) == 1
    assert b"incomplete" in err
    assert len(screen.file(0, "stdout.log")) == 100_000


@pytest.mark.parametrize("full", ["output", "error"])
def test_lines_that_a_full_disk_does_not_take_are_told_of_on_the_other_stream(
    tmp_path: Path, ends: list[int], full: str
) -> None:
    source, sink = os.pipe()
    nowhere = os.open("/dev/full", os.O_WRONLY)
    ends += [source, nowhere]
    pump = LogPump(LogSpec(), str(tmp_path), *((nowhere, sink) if full == "output" else (sink, nowhere)))
    pump.say("the launcher's own, which is in no file")
    out_fd, err_fd = pump.open_rank(label())
    precious, other = (out_fd, err_fd) if full == "output" else (err_fd, out_fd)
    os.write(precious, b"one\ntwo\nthree")
    os.write(other, b"shown\n")
    os.close(out_fd)
    os.close(err_fd)
    await_drained(pump, 0)
    assert not pump.close(SOON_S)
    os.close(sink)
    log = tmp_path / f"generation_0/rank_0/std{full[:3]}.log"
    words = f"ddp-launch: standard {full} could not be written (No space left on device): "
    told = Reader(source).all().decode()
    assert told.splitlines()[-1] == f"{words}3 lines missing in this output; the log: {log}"
    assert told.count("could not be written") == told.count("shown\n") == 1


def test_a_full_disk_that_has_room_again_is_told_what_it_lost_between_whole_lines(tmp_path: Path) -> None:
    """A file size limit fails writes as a full disk does; SIGXFSZ would come first."""
    path = tmp_path / "output"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    terminal = Output(fd)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, hard))
    try:
        for line in (b"first\n", b"second of them\n", b"third\n"):
            terminal.put(line, "the log")
            terminal.flush()
        assert terminal.lost_lines(is_over=False) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    terminal.put(b"fourth\n", "the log")
    terminal.flush()
    lost = "could not be written (File too large): 2 lines missing in this output; the log: the log"
    assert [terminal.lost_lines(is_over=False), terminal.lost_lines(is_over=True)] == [lost, ""]
    terminal.close(time.monotonic())
    os.close(fd)
    assert path.read_bytes() == b"first\nsecond\nfourth\n"


def test_an_idle_pump_does_not_wake_up(tmp_path: Path) -> None:
    screen = Screen(tmp_path, LogSpec())
    fds = screen.pump.open_rank(label())
    os.write(fds[0], b"\r50%")
    screen.out.wait_for(b"50%")
    thread = next(t.native_id for t in threading.enumerate() if t.name == "logs")

    def switches() -> str:
        with open(f"/proc/self/task/{thread}/status") as status:
            return next(line for line in status if line.startswith("voluntary"))

    def is_still() -> bool:
        before = switches()
        select.select((), (), (), 0.3)  # the time that is observed
        return switches() == before

    eventually(is_still, what="it settles, and nobody stops this process for a moment")
    for fd in fds:
        os.close(fd)
    screen.end()


def test_close_takes_what_is_still_in_the_pipes(tmp_path: Path, ends: list[int]) -> None:
    screen = Screen(tmp_path, LogSpec())
    out_fd, err_fd = screen.pump.open_rank(label())
    ends += [out_fd, err_fd]
    os.write(out_fd, b"z" * 100_000 + b"\nend")
    out, _ = screen.end()
    assert out.endswith(b"z\n[n0:0] end")
    assert screen.file(0, "stdout.log") == b"z" * 100_000 + b"\nend"
    screen.pump.say("after the end")  # to the descriptor itself: nothing is lost, and nothing raises


def test_the_interpreter_can_exit_while_the_pump_runs(tmp_path: Path) -> None:
    script = (
        "from launcher.output.logs import LogPump, RankLabel\nfrom launcher.settings.spec import LogSpec\n"
        f"p = LogPump(LogSpec(), {str(tmp_path)!r})\n"
        "p.open_rank(RankLabel('n', 0, 0, 'd', 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
