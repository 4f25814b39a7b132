"""The network of the lab: one thread that carries packets between the hosts' devices, and spoils them as told.

Every host has a TUN device. What a host sends comes out of its file descriptor as a bare IP packet, is put through
the link from this host to the one that has the destination's address, and is written into that one's descriptor.
So every fault of a network is a few lines here, needs no module of the kernel, and looks to the hosts as the real
one does: packets that never arrive, without any word of an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKETS_AT_ONCE = 64
_QUEUE_S = 0.1  # a slow link holds back so much; what exceeds it is dropped, as in any router


@dataclass
class Link:
    """One direction between two hosts. `rate` in bits per second, 0: unlimited."""

    up: bool = True
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    busy_until: float = 0.0
    carried: int = 0
    dropped: int = 0

    def arrival(self, now: float, size: int, chance: random.Random) -> float | None:
        """When a packet that is sent now gets there; None if it does not."""
        if not self.up or (self.loss and chance.random() < self.loss):
            return None
        at = now + self.delay_s + (chance.random() * self.jitter_s if self.jitter_s else 0.0)
        if self.rate:
            start = max(self.busy_until, now)
            if start - now > _QUEUE_S:
                return None
            self.busy_until = start + size * 8 / self.rate
            at += self.busy_until - now
        return at


def open_device(name: str) -> int:
    """A new TUN device of this name; its file descriptor goes on working when it is moved to another namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def destination(packet: bytes) -> bytes:
    return packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]


class Switch:
    """Ports are numbers; `addresses` of a port may change while it runs."""

    def __init__(self, seed: int = 0) -> None:
        self.links: dict[tuple[int, int], Link] = {}
        self._chance = random.Random(seed)
        self._devices: dict[int, int] = {}  # port -> file descriptor
        self._ports: dict[int, int] = {}
        self._port_of: dict[bytes, int] = {}  # address -> port
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._number = itertools.count()
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake_in, select.EPOLLIN)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="lab switch", daemon=True)
        self._thread.start()

    # --- what is plugged in ------------------------------------------------------------------------

    def plug(self, port: int, device: int, addresses: list[bytes]) -> None:
        with self._lock:
            for other in self._devices:
                self.links.setdefault((port, other), Link())
                self.links.setdefault((other, port), Link())
            self._devices[port], self._ports[device] = device, port
            self._port_of.update(dict.fromkeys(addresses, port))
            self._poll.register(device, select.EPOLLIN)

    def unplug(self, port: int) -> None:
        """From this moment on not one packet comes out of it or gets into it."""
        with self._lock:
            device = self._devices.pop(port, None)
            if device is None:
                return
            del self._ports[device]
            self._port_of = {address: at for address, at in self._port_of.items() if at != port}
            self._poll.unregister(device)
            os.close(device)

    def close(self) -> None:
        self._open = False
        os.write(self._wake_out, b"x")
        self._thread.join()
        for port in list(self._devices):
            self.unplug(port)
        self._poll.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    # --- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._open:
            due_in = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else 1.0
            ready = self._poll.poll(max(0.0, min(1.0, due_in)))
            with self._lock:
                self._deliver_due()
                for device, _ in ready:
                    if device in self._ports:  # not the pipe, and not unplugged since
                        self._take(device)

    def _take(self, device: int) -> None:
        port = self._ports[device]
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(device, 65536)
            except OSError:  # no more for now, or a device that is just being set up
                return
            to = self._port_of.get(destination(packet))
            if to is not None and to != port:
                self._send(self.links[port, to], to, packet)

    def _send(self, link: Link, to: int, packet: bytes) -> None:
        now = time.monotonic()
        at = link.arrival(now, len(packet), self._chance)
        if at is None:
            link.dropped += 1
            return
        link.carried += 1
        if at <= now:
            self._write(to, packet)
        else:
            heapq.heappush(self._on_the_way, (at, next(self._number), to, packet))

    def _deliver_due(self) -> None:
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._on_the_way)
            self._write(to, packet)

    def _write(self, to: int, packet: bytes) -> None:
        if to in self._devices:
            with contextlib.suppress(OSError):  # its queue is full, or it is not up: lost, as on any wire
                os.write(self._devices[to], packet)
