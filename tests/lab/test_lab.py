"""The lab is what it says: hosts that are apart, a network that can be spoiled, a power switch."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from lab_host import SOON_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_host import Host, Process
    from lab_network import Lab

    Build = Callable[..., Lab]

# Answers each connection with its own host's name, then reads until the end, and closes it.
ANSWER = """
import socket, sys
server = socket.create_server(("", 7777), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        connection.sendall(socket.gethostname().encode())
        while connection.recv(1 << 16):
            pass
"""


# Asks the host that is its argument; prints who answered, and how long a connection took.
ASK = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7777), timeout=float(sys.argv[2])) as connection:
    took = time.monotonic() - began
    print(connection.recv(100).decode(), took)
"""
# Prints what it hears of a peer, and in the end how the connection ended.
LISTEN = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7777), timeout=float(sys.argv[2]))
print(connection.recv(100).decode(), flush=True)
connection.settimeout(1.5)
try:
    print("ended" if connection.recv(100) == b"" else "spoke", flush=True)
except TimeoutError:
    print("silence", flush=True)
except ConnectionError:
    print("reset", flush=True)
"""


def answering(host: Host, tmp_path: Path) -> Process:
    out = tmp_path / f"answers-{host.name}"
    with out.open("wb") as file:
        server = host.start(sys.executable, "-c", ANSWER, stdout=file)
    eventually(lambda: b"listening" in out.read_bytes(), what=f"{host} listens")
    return server


def asked(host: Host, whom: str, timeout_s: float = SOON_S) -> tuple[str, float]:
    name, took = host.run(sys.executable, "-c", ASK, whom, str(timeout_s)).split()
    return name, float(took)


def silent(host: Host, whom: str) -> bool:
    try:
        asked(host, whom, 0.5)
    except AssertionError as error:
        return "timed out" in str(error)
    return False


def test_a_cut_link_is_silent_until_it_is_mended(lab: Build, tmp_path: Path) -> None:
    made = lab(3)
    a, b, c = made.hosts
    answering(b, tmp_path)
    made.cut(b)
    assert silent(a, "node1")
    assert silent(c, "fd77::2")
    made.mend(b)
    assert asked(a, "node1")[0] == "node1"


def test_power_off_ends_everything_without_a_word_to_the_peers(lab: Build, tmp_path: Path) -> None:
    made = lab(2)
    a, b = made.hosts
    server = answering(b, tmp_path)
    deaf = b.start("sh", "-c", "trap '' TERM; (trap '' HUP; sleep 1000) & sleep 1000")
    pids = eventually(lambda: len(b.processes()) >= 4 and list(b.processes()))
    out = tmp_path / "heard"
    with out.open("wb") as file:
        listening = a.start(sys.executable, "-c", LISTEN, "node1", str(SOON_S), stdout=file)
    eventually(lambda: b"node1" in out.read_bytes())
    began = time.monotonic()
    made.power_off(b)
    assert time.monotonic() - began < SOON_S / 2
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert (server.wait(), deaf.wait()) == (-9, -9)
    assert listening.wait() == 0
    assert out.read_text().split() == ["node1", "silence"]


def test_a_host_without_a_default_route_knows_its_address_for_others(lab: Build) -> None:
    """Debian says that the name of a host is 127.0.1.1. The rendezvous is then served at this address."""
    (host,) = lab(1).hosts
    code = "from launcher.joining import addresses as a; print(a.default_route_address(), a.address_for_others())"
    assert host.run(sys.executable, "-c", code).split() == [host.address]
