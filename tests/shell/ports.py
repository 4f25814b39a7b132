"""Ports for those who must be told one beforehand.

A port that the kernel chose, and that was given back, may be the end of anybody's connection a moment later. Those
below the range that it chooses from are taken only by who asks for them, so a random one stays free.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_CHOSEN_BY_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_ENOUGH = 5_000


def free_ports(n: int) -> list[int]:
    first, last = map(int, _CHOSEN_BY_THE_KERNEL.read_text().split())
    candidates = range(_LOWEST, first) if first - _LOWEST >= _ENOUGH else range(first, last + 1)
    shuffled = random.SystemRandom().sample(candidates, len(candidates))
    found = (port for port in shuffled if _is_free(port))
    return [next(found) for _ in range(n)]


def free_port() -> int:
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
