"""Pipes whose reader is slow, stops or leaves: nothing is lost, and only ranks that print wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest
from launched import FAMILY, SOON_S, eventually
from test_logs import Reader, Screen, await_drained, ends, is_drained, label, write_all

from launcher.output.logs import PIPE_SIZE, LogPump
from launcher.output.terminal import QUEUE_LIMIT
from launcher.ranks.worker import Workers
from launcher.settings.spec import LogSpec

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch, Launched

__all__ = ["ends"]
LINES = [b"%06d %s\n" % (i, b"x" * 92) for i in range((QUEUE_LIMIT + 3 * PIPE_SIZE) // 100)]
TEXT = b"".join(LINES)


def write_text(fd: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the pump has ended
        write_all(fd, TEXT)


class Slow:
    """A pump whose output leads to a reader that has not begun to read, and one rank that writes."""

    def __init__(self, folder: Path, ends: list[int], fds: tuple[int, int] | None = None) -> None:
        self.source, self.sink = fds or os.pipe()
        ends.append(self.source)
        self.pump = LogPump(LogSpec(prefix=""), str(folder), self.sink, self.sink)
        self.out_fd, err_fd = self.pump.open_rank(label())
        os.close(err_fd)
        self.writer = threading.Thread(target=self._write, daemon=True)

    def _write(self) -> None:
        write_text(self.out_fd)
        os.close(self.out_fd)

    def begin(self) -> None:
        self.writer.start()
        eventually(lambda: self.pump.blocked_ranks() == [0], what="the rank waits for the reader")

    def close(self) -> threading.Thread:
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        return closing

    def _close(self) -> None:
        self.all_shown = self.pump.close(SOON_S)
        os.close(self.sink)


def test_a_rank_waits_for_the_reader_and_nothing_is_lost(tmp_path: Path, ends: list[int]) -> None:
    slow = Slow(tmp_path, ends)
    slow.begin()
    assert slow.writer.is_alive()
    assert not is_drained(slow.pump, 0)  # its thread still answers
    reader = Reader(slow.source)
    slow.writer.join(SOON_S)
    await_drained(slow.pump, 0)
    assert slow.pump.blocked_ranks() == []
    slow.close().join(SOON_S)
    assert slow.all_shown
    assert reader.all() == TEXT
    assert (tmp_path / "generation_0/rank_0/stdout.log").read_bytes() == TEXT


def test_the_end_waits_for_the_reader(tmp_path: Path, ends: list[int]) -> None:
    slow = Slow(tmp_path, ends)
    slow.begin()
    closing = slow.close()
    assert closing.is_alive()
    reader = Reader(slow.source)
    closing.join(SOON_S)
    slow.writer.join(SOON_S)
    assert slow.all_shown
    assert TEXT.startswith(reader.all()[:-1])  # the newline of the last line may be ours
    assert len(reader.data) >= QUEUE_LIMIT + PIPE_SIZE // 2  # all that was written before the end


def test_the_end_waits_for_the_reader_of_a_socket(tmp_path: Path, ends: list[int]) -> None:
    ours, theirs = socket.socketpair()
    slow = Slow(tmp_path, ends, (ours.detach(), theirs.detach()))
    slow.begin()
    closing = slow.close()
    reader = Reader(slow.source)
    closing.join(SOON_S)
    slow.writer.join(SOON_S)
    assert slow.all_shown
    assert TEXT.startswith(reader.all()[:-1])
    assert len(reader.data) >= QUEUE_LIMIT


@pytest.mark.parametrize("how", ["the reader leaves", "it is abandoned"])
def test_the_wait_for_a_reader_ends(tmp_path: Path, ends: list[int], how: str) -> None:
    slow = Slow(tmp_path, ends)
    slow.begin()
    closing = slow.close()
    if how == "the reader leaves":
        os.close(ends.pop())
    else:
        slow.pump.abandon()
    closing.join(SOON_S)
    slow.writer.join(SOON_S)
    assert not closing.is_alive()
    assert slow.all_shown is (how == "the reader leaves")  # it did not want the rest


def test_a_reader_that_leaves_releases_the_ranks(tmp_path: Path, ends: list[int]) -> None:
    slow = Slow(tmp_path, ends)
    slow.begin()
    os.close(ends.pop())
    slow.writer.join(SOON_S)
    await_drained(slow.pump, 0)
    slow.close().join(SOON_S)
    assert (tmp_path / "generation_0/rank_0/stdout.log").read_bytes() == TEXT


def test_the_tail_of_a_failed_rank_is_read_while_its_output_is_held(tmp_path: Path, ends: list[int]) -> None:
    slow = Slow(tmp_path, ends)
    slow.begin()
    log = tmp_path / "generation_0/rank_0/stdout.log"
    before = log.stat().st_size
    read = threading.Event()
    slow.pump.catch_up(0, 0, read.set)
    assert read.wait(SOON_S)
    assert log.stat().st_size > before
    reader = Reader(slow.source)
    slow.writer.join(SOON_S)
    await_drained(slow.pump, 0)
    slow.close().join(SOON_S)
    assert reader.all() == TEXT


def test_a_failed_rank_is_explained_although_its_output_is_read_late(tmp_path: Path) -> None:
    """On a busy machine the thread that reads it does not run at once."""
    screen, held = Screen(tmp_path, LogSpec()), threading.Event()
    workers = Workers.__new__(Workers)
    workers._logs = screen.pump
    screen.pump._ask(held.wait)
    screen.write(0, err=b"ValueError: bad batch\n")

    async def story() -> None:
        asyncio.get_running_loop().call_later(0.2, held.set)
        await workers._read_last_output(label())

    asyncio.run(story())
    assert screen.pump.stderr_tail(0, 0) == b"ValueError: bad batch\n"
    screen.end()


def test_one_blocked_output_does_not_hold_the_other(tmp_path: Path, ends: list[int]) -> None:
    (out, out_sink), (err, err_sink) = os.pipe(), os.pipe()
    pump = LogPump(LogSpec(prefix=""), str(tmp_path), out_sink, err_sink)
    out_fd, err_fd = pump.open_rank(label())
    ends += [out, err, out_sink, out_fd, err_fd]
    writer = threading.Thread(target=write_text, args=(out_fd,), daemon=True)
    writer.start()
    eventually(lambda: pump.blocked_ranks() == [0])
    reader = Reader(err)
    write_all(err_fd, b"error\n")
    reader.wait_for(b"error\n")
    pump.abandon()
    assert not pump.close(0)
    writer.join(SOON_S)
    os.close(err_sink)
    reader.all()


# --- whole jobs ----------------------------------------------------------------------------------------

_N = (QUEUE_LIMIT + 2 * PIPE_SIZE) // 100
PRINTED = "".join(f"{i:07d} {'y' * 91}\n" for i in range(_N))
PRINTS = f"print(*(str(i).zfill(7) + ' ' + 'y' * 91 for i in range({_N})), sep=chr(10))\n"


def piped(
    launch: Launch, source: str, *words: str, size: int = 16384, **popen: object
) -> tuple[Launched, int]:
    """A job of one rank whose output goes into a small pipe that nobody reads yet."""
    import fcntl

    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
    job = launch("--no-warm-start", "--log-prefix", "", *words, source=source, stdout=writer, **popen)
    os.close(writer)
    return job, reader


def read_all(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 1 << 16):
        data += chunk
    os.close(fd)
    return data


def test_a_job_ends_when_its_output_is_read(launch: Launch) -> None:
    job, reader = piped(launch, PRINTS, "--nproc-per-node", "1")
    select.select((reader,), (), (), SOON_S)
    assert job.agent.poll() is None
    text = read_all(reader)
    assert job.wait() == 0, job.stderr()
    assert text == PRINTED.encode()
    assert job.logs() == []  # all was shown


def test_a_signal_ends_the_wait_for_a_reader(launch: Launch) -> None:
    source = FAMILY + "print('z' * 100_000); sys.stdout.flush(); there('written')\n"
    job, reader = piped(launch, source, "--nproc-per-node", "1")
    job.await_there("written-0")
    eventually(lambda: not job.zygote(), what="the ranks have ended")
    assert job.agent.poll() is None
    job.send(signal.SIGINT)
    assert job.wait() == 0
    assert "some output was not shown" in job.stderr()
    (folder,) = job.logs()
    assert (folder / "generation_1/rank_0/stdout.log").read_bytes() == b"z" * 100_000 + b"\n"
    os.close(reader)


def test_one_signal_ends_a_job_whose_output_nobody_reads(launch: Launch) -> None:
    """A scheduler sends SIGTERM once, and SIGKILL after its own grace."""
    more_than_the_pipe_holds = f"for _ in range({QUEUE_LIMIT // 2_000}):\n    print('z' * 999, flush=True)\n"
    source = FAMILY + more_than_the_pipe_holds + "there('printing')\nwhile True:\n    print('z' * 999)\n"
    job, reader = piped(launch, source, "--nproc-per-node", "1", "--shutdown-timeout", "5")
    job.await_there("printing-0")
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    assert "some output was not shown" in job.stderr()
    os.close(reader)
