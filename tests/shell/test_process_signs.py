"""What the kernel counts of a process: also what goes over its connections."""

from __future__ import annotations

import os
import socket

import pytest

from launcher.health.hang_watch import signs_of, tcp_bytes


@pytest.mark.parametrize(("family", "here"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_bytes_of_connections_count(family: socket.AddressFamily, here: str) -> None:
    with socket.create_server((here, 0), family=family) as server:
        port = server.getsockname()[1]
        with socket.create_connection((here, port)) as ours, server.accept()[0] as theirs:

            def count(left_out: int = 0) -> int:
                return signs_of(os.getpid(), 0, 0, tcp_bytes(left_out)).network_bytes

            before, of_store = count(), count(left_out=port)
            ours.sendall(bytes(10_000))
            left = 10_000
            while left:
                left -= len(theirs.recv(left))
            assert 10_000 <= count() - before <= 20_002, "received by one side; confirmed to the other, soon"
            assert count(left_out=port) == of_store


def test_bytes_of_files_count() -> None:
    before = signs_of(os.getpid(), 0, 0, {}).io_bytes
    with open("/dev/null", "wb") as file:
        file.write(bytes(10_000))
    assert signs_of(os.getpid(), 0, 0, {}).io_bytes - before >= 10_000
