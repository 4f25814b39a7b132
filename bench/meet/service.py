"""The rendezvous service as a process of its own, on each of its stores; and what it costs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

STORES = ("memory", "file", "etcd")
SERVE = [os.path.join(os.path.dirname(sys.executable), "ddp-rendezvous"), "serve"]
_START_S = 30.0


class Service:
    def __init__(self, endpoint: str, pid: int) -> None:
        self.endpoint = endpoint
        self.pid = pid

    def cpu_seconds(self) -> float:
        """All threads, by the kernel's clock for the process: ticks of 10 ms are too coarse."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def resident_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 2**20


def available() -> tuple[str, ...]:
    return STORES if shutil.which("etcd") else STORES[:2]


@contextlib.contextmanager
def serving(store: str) -> Iterator[Service]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-rendezvous-"))
        match store:
            case "file":
                url = f"file:{folder}/jobs.sqlite"
            case "etcd":
                url = f"etcd://{stack.enter_context(_etcd(folder))}/bench"
            case _:
                url = store
        endpoint = f"127.0.0.1:{free_port()}"
        log = os.path.join(folder, "service.log")
        pid = stack.enter_context(process([*SERVE, "--listen", endpoint, "--store", url], log))
        await_port(endpoint, pid, log)
        yield Service(endpoint, pid)


@contextlib.contextmanager
def _etcd(folder: str) -> Iterator[str]:
    """One member on this machine, its data in the same folder as that of the other stores."""
    client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = ["etcd", "--data-dir", os.path.join(folder, "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}"]
    command += ["--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"]
    command += ["--initial-cluster", f"default=http://{peer}"]
    log = os.path.join(folder, "etcd.log")
    with process(command, log) as pid:
        await_port(client, pid, log)
        yield client


@contextlib.contextmanager
def process(command: list[str], log: str) -> Iterator[int]:
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as started:
        try:
            yield started.pid
        finally:
            started.terminate()
            try:
                started.wait(15)
            except subprocess.TimeoutExpired:
                started.kill()


def await_port(endpoint: str, pid: int, log: str) -> None:
    host, _, port = endpoint.rpartition(":")
    give_up_at = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            if time.monotonic() > give_up_at or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                with open(log) as said:
                    raise SystemExit(f"nothing listens at {endpoint}:\n{said.read()[-2000:]}") from None
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
