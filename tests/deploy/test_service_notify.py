"""What systemd hears of the service, and what a container engine's probe finds."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from served import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SOON_S = 60.0


class Systemd:
    """Hears whatever is said to it, at once: what finds no room in its socket is said to nobody."""

    def __init__(self, address: str) -> None:
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(address)
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        while words := self._sock.recv(4096):
            self._heard.put(words)
        self._sock.close()

    def next(self) -> bytes:
        return self._heard.get(timeout=_SOON_S)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._sock.getsockname())


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    with contextlib.closing(Systemd(str(tmp_path / "notify"))) as made:
        yield made


def test_systemd_hears_that_it_is_ready_turns_and_stops(tmp_path: Path, systemd: Systemd) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with serving(env=environ) as service:
        assert systemd.next().startswith(b"READY=1\nSTATUS=serving at 127.0.0.1:")
        assert [systemd.next() for _ in range(3)] == [b"WATCHDOG=1"] * 3
        os.kill(service.pid, signal.SIGSTOP)  # a loop that does not turn says nothing
        os.kill(service.pid, signal.SIGCONT)
        assert service.end() == 0
        heard = []
        while not heard or heard[-1] != b"STOPPING=1":
            heard.append(systemd.next())
        assert set(heard) <= {b"WATCHDOG=1", b"STOPPING=1"}


def test_another_process_watchdog_is_not_fed(tmp_path: Path, systemd: Systemd) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"}
    with serving(env=environ) as service:
        assert systemd.next().startswith(b"READY=1")
        assert service.end() == 0
        assert systemd.next() == b"STOPPING=1"


def probe(address: str) -> int:
    command = [sys.executable, "-m", "rendezvous.service.probe"]
    environ = os.environ | {"DDP_RENDEZVOUS_HTTP": address}
    return subprocess.run(command, env=environ, capture_output=True, timeout=60).returncode


def test_the_probe_finds_a_service_that_answers_and_one_that_does_not() -> None:
    with serving("--http", "127.0.0.1:0") as service:
        port = service.await_line(r"metrics at .*:(\d+)")[1] if not service.log else _port(service.log)
        assert probe(f"127.0.0.1:{port}") == 0
        assert probe(f"0.0.0.0:{port}") == 0
    assert probe(f"127.0.0.1:{port}") == 1
    assert probe("") == 0


def _port(log: list[str]) -> str:
    (line,) = [line for line in log if "metrics at" in line]
    return line.strip().rpartition(":")[2]
