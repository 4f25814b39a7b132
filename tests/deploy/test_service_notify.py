"""What systemd hears of the service, and what a container engine's probe finds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from served import serving

if TYPE_CHECKING:
    from pathlib import Path


def test_systemd_hears_that_it_is_ready_turns_and_stops(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(20.0)
        with serving(env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}) as service:
            assert sock.recv(4096).startswith(b"READY=1\nSTATUS=serving at 127.0.0.1:")
            assert [sock.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            os.kill(service.pid, signal.SIGSTOP)  # a loop that does not turn says nothing
            os.kill(service.pid, signal.SIGCONT)
            assert service.end() == 0
            heard = []
            while not heard or heard[-1] != b"STOPPING=1":
                heard.append(sock.recv(4096))
            assert set(heard) <= {b"WATCHDOG=1", b"STOPPING=1"}


def test_another_process_watchdog_is_not_fed(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(20.0)
        environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"}
        with serving(env=environ) as service:
            assert sock.recv(4096).startswith(b"READY=1")
            assert service.end() == 0
            assert sock.recv(4096) == b"STOPPING=1"


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
