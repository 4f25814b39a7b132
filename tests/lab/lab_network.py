"""Several hosts on one machine, joined by a network whose every link can be spoiled.

    lab = Lab(3)                                 node0, node1, node2, each 10.77.0.(1 + i) and fd77::(1 + i)
    lab.cut(node)                                its cable is pulled; lab.mend(node)
    lab.partition([a, b], [c])                   each group by itself; lab.heal() undoes everything
    lab.shape(a, b, delay_s=0.02, loss=0.01)     both directions of one link
    lab.power_off(node)                          link and processes, at once; lab.power_on(node, number=9)

Nothing of it is visible on this machine: the names and addresses live in the hosts' own namespaces, so that several
labs can run beside each other.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab_host import Host
from lab_switch import Link, Switch, open_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MTU = 9000
_COUNT = itertools.count()


class Lab:
    def __init__(self, n: int, *others: str, seed: int = 0) -> None:
        self._mark = f"{os.getpid()}x{next(_COUNT)}"
        self._folder = Path(tempfile.mkdtemp(prefix="lab-"))
        self._hosts_file = self._folder / "hosts"
        self._open_network(seed)
        names = [*(f"node{i}" for i in range(n)), *others]
        self.hosts = [Host(name, self._hosts_file, self._mark) for name in names]
        self._numbers = {host.name: at + 1 for at, host in enumerate(self.hosts)}
        self._versions = (4, 6)
        self._write_hosts_file()
        try:
            for host in self.hosts:
                self.power_on(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for host in self.hosts:
            self._unplug(host)
            host.kill_everything()
        self._close_network()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, number: int) -> Host:
        """One more host, which runs and has the addresses of this number."""
        host = Host(name, self._hosts_file, self._mark)
        self.hosts.append(host)
        self.power_on(host, number)
        return host

    # --- power -------------------------------------------------------------------------------------

    def power_on(self, host: Host, number: int | None = None) -> None:
        """`number`: it comes back with other addresses than before."""
        if number is not None:
            self._numbers[host.name] = number
            self._write_hosts_file()
        host.boot()
        name = f"l{self._mark}p{self._port(host)}"  # 15 characters at most
        self._plug(host, self._addresses(host), name)

    def power_off(self, host: Host) -> None:
        """The link first: what dying processes would still say to their peers is not heard."""
        self._unplug(host)
        host.kill_everything()

    # --- the network -------------------------------------------------------------------------------

    def _open_network(self, seed: int) -> None:
        self._switch = Switch(seed)

    def _close_network(self) -> None:
        self._switch.close()

    def _plug(self, host: Host, addresses: tuple[str, ...], name: str) -> None:
        """`name`: of the new device, until it is the host's."""
        device = open_device(name)
        host.connect(name, addresses, MTU)
        packed = [ipaddress.ip_address(address).packed for address in addresses]
        self._switch.plug(self._port(host), device, packed)

    def _unplug(self, host: Host) -> None:
        self._switch.unplug(self._port(host))

    # --- links -------------------------------------------------------------------------------------

    def links(self, a: Host, b: Host) -> Iterator[Link]:
        for pair in ((a, b), (b, a)):
            yield self._switch.links[self._port(pair[0]), self._port(pair[1])]

    def shape(self, a: Host, b: Host, **how: Any) -> None:
        for link in self.links(a, b):
            for name, value in how.items():
                setattr(link, name, value)

    def cut(self, host: Host) -> None:
        self.partition([host], [other for other in self.hosts if other is not host])

    def mend(self, host: Host) -> None:
        for other in self.hosts:
            if other is not host:
                self.shape(host, other, up=True)

    def partition(self, *groups: Iterable[Host]) -> None:
        """Hosts that are in no group keep their links to each other."""
        group_of = {host.name: at for at, group in enumerate(groups) for host in group}
        for a, b in itertools.combinations(self.hosts, 2):
            self.shape(a, b, up=group_of.get(a.name) == group_of.get(b.name))

    def heal(self) -> None:
        for a, b in itertools.combinations(self.hosts, 2):
            for link in self.links(a, b):
                link.__dict__.update(replace(Link(), carried=link.carried, dropped=link.dropped).__dict__)

    # --- names and addresses -----------------------------------------------------------------------

    def name_by_version(self, *versions: int) -> None:
        """Names stand for the addresses of these versions of IP only."""
        self._versions = versions
        self._write_hosts_file()

    def _port(self, host: Host) -> int:
        return self.hosts.index(host)

    def _addresses(self, host: Host) -> tuple[str, str]:
        number = self._numbers[host.name]
        return (f"10.77.0.{number}", f"fd77::{number:x}")

    def _write_hosts_file(self) -> None:
        """Into the same file: it is mounted in hosts that run. In one piece, and not cut off before, so that no name is
        unknown meanwhile."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.hosts:
            named = (a for a in self._addresses(host) if (6 if ":" in a else 4) in self._versions)
            lines += [f"{address} {host.name}" for address in named]
        content = "".join(f"{line}\n" for line in lines).encode()
        file = os.open(self._hosts_file, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(file, content.ljust(os.fstat(file).st_size, b"\n"), 0)
        os.close(file)


def left_behind() -> list[str]:
    """Devices of labs of this process that are still on this machine; there should be none."""
    shown = subprocess.run(("ip", "-o", "link"), capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if f" l{os.getpid()}x" in line]
