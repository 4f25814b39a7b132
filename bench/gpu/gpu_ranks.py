"""Starts the ranks of a program without a launcher, for parts that test or measure something else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import gpu_part

_LOOK_EVERY_S = 0.02
_SHOWN = 1500


class RanksFailed(Exception):
    """The text has the end of the output of the rank that failed first."""


def run_ranks(
    program: str, ranks: int, *words: str, timeout_s: float, env: dict[str, str] | None = None
) -> None:
    """Run `program` of the folder programs/ on so many ranks of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = os.environ | gpu_part.sharing_env(ranks) | (env or {})
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, os.path.join(gpu_part.PROGRAMS, program), *words]
    read, write = os.pipe()
    started = []
    for rank in range(ranks):
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = (
            write if rank else None
        )  # rank 0 writes to the log; of the others only the end is of interest
        started.append(
            subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT if rank else None)
        )
    os.close(write)
    os.set_blocking(read, False)
    told = b""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in started):
            told = (told + _read(read))[-_SHOWN:]
            _raise_if_failed(started, told)
            if time.monotonic() > deadline:
                raise RanksFailed(f"{program} was not done after {timeout_s:g} s\n{_text(told)}")
            time.sleep(_LOOK_EVERY_S)
        told = (told + _read(read))[-_SHOWN:]
        _raise_if_failed(started, told)
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.close(read)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def _raise_if_failed(started: list[subprocess.Popen[bytes]], told: bytes) -> None:
    for rank, process in enumerate(started):
        if process.returncode:
            code = process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RanksFailed(f"rank {rank} failed ({how})\n{_text(told)}")


def _text(told: bytes) -> str:
    return told.decode(errors="replace").strip()
