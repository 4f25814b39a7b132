"""A lab whose network is a bridge of the kernel: for many hosts, whose packets one thread of Python could not carry.

Its links can be cut, as the power of its hosts can be. They cannot be shaped: that is what the switch is for.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from lab_host import eventually
from lab_network import MTU, Lab

if TYPE_CHECKING:
    from lab_host import Host

_BRIDGE = "bridge"


class BridgedLab(Lab):
    def _open_network(self, _seed: int) -> None:
        """The bridge lives in a network namespace of its own, which ends with its only process."""
        self._hub = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"),
            stdin=subprocess.DEVNULL,
        )
        eventually(self._is_apart, what="the bridge has a namespace")
        self._in_hub(f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up")

    def _close_network(self) -> None:
        self._hub.kill()
        self._hub.wait()

    def _plug(self, host: Host, addresses: tuple[str, ...], name: str) -> None:
        self._in_hub(f"link add {self._end(host)} type veth peer name {name} netns {os.getpid()}")
        host.connect(name, addresses, MTU)
        self._in_hub(
            f"link set {self._end(host)} mtu {MTU} master {_BRIDGE}", f"link set {self._end(host)} up"
        )

    def _unplug(self, host: Host) -> None:
        """The other end goes with the namespace of the host."""
        if host.is_on:
            self._in_hub(f"link set {self._end(host)} down")

    def cut(self, host: Host) -> None:
        self._unplug(host)

    def mend(self, host: Host) -> None:
        self._in_hub(f"link set {self._end(host)} up")

    def _end(self, host: Host) -> str:
        """The device of this host on the bridge."""
        return f"port{self._port(host)}"

    def _in_hub(self, *orders: str) -> None:
        command = ("nsenter", "-t", str(self._hub.pid), "-n", "ip", "-batch", "-")
        subprocess.run(command, input="\n".join(orders).encode(), check=True)

    def _is_apart(self) -> bool:
        links = [os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", str(self._hub.pid))]
        return links[0] != links[1]
