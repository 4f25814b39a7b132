"""Hosts for a bench: network namespaces of this machine, joined by a switch, with a limited link each.

Needs root, `ip` and `tc`. Every host shares the processors of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEVICE = "cable"
_BITS = {"mbit": 1e6, "gbit": 1e9}
UNLIMITED = "unlimited"


def why_not() -> str:
    """What is missing here, if anything."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no `{program}` here (Debian: apt-get install iproute2)"
    if os.geteuid():
        return "network namespaces are made by root only"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


def bandwidth(rate: str) -> float:
    """Bytes per second of a rate as tc writes it."""
    return float(rate[:-4]) * _BITS[rate[-4:]] / 8


@contextmanager
def switched(hosts: int, rate: str) -> Iterator[list[str]]:
    """Namespaces with the addresses 10.79.0.1, 10.79.0.2, ..., joined by a bridge."""
    hub, *names = [f"bench-{os.getpid()}-{number}" for number in range(hosts + 1)]
    with ExitStack() as undo:
        for name in (hub, *names):
            do("ip", "netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        do("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
        do("ip", "-n", hub, "link", "set", "switch", "up")
        for number, name in enumerate(names, 1):
            _join(hub, f"port{number}", name, f"10.79.0.{number}/24", rate)
        yield names


def _join(hub: str, port: str, name: str, address: str, rate: str) -> None:
    do("ip", "link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
    do("ip", "-n", hub, "link", "set", port, "master", "switch")
    do("ip", "-n", name, "addr", "add", address, "dev", DEVICE)
    for space, device in ((name, "lo"), (name, DEVICE), (hub, port)):
        do("ip", "-n", space, "link", "set", device, "up")
    for space, device in ((name, DEVICE), (hub, port)) if rate != UNLIMITED else ():
        limit = ("rate", rate, "burst", "32k", "latency", "50ms")
        do("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)


def do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def play(
    names: list[str], ranks_each: int, script: Sequence[str], trial: dict[str, Any], timeout_s: float
) -> Any:
    """Run `script`, with a folder as its last word, for each rank of each host; return what rank 0 has left there."""
    world, deadline = ranks_each * len(names), time.monotonic() + timeout_s
    env = {**os.environ, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": DEVICE}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as end:
        with open(os.path.join(folder, "trial.json"), "w") as file:
            json.dump(trial, file)
        started = []
        for rank in range(world):
            inside = ["ip", "netns", "exec", names[rank // ranks_each], sys.executable, *script, folder]
            process = subprocess.Popen(inside, env={**env, "RANK": str(rank)})
            end.callback(process.wait)
            end.callback(process.kill)
            started.append(process)
        for process in started:
            try:
                failed = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise SystemExit(f"not done within {timeout_s:g} s") from None
            if failed:
                raise SystemExit("a rank failed")
        with open(os.path.join(folder, "taken.json")) as file:
            return json.load(file)
