"""One host of bench/plan.py: sends to the next host while the one before sends to it, as in a ring. No torch.

Rank 0 writes how many bytes per second have reached it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time

_PORT = 5999
_SETTLES_S, _COUNTED_S = 1.0, 3.0
_WITHIN_S = 20.0


def connected(address: str) -> socket.socket:
    deadline = time.monotonic() + _WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, _PORT), 1.0)
        if time.monotonic() > deadline:
            raise SystemExit(f"{address} does not answer")
        time.sleep(0.05)


def send(address: str) -> None:
    """Send until the receiver has counted enough."""
    data = bytes(1 << 18)
    with contextlib.suppress(OSError), connected(address) as line:
        while True:
            line.sendall(data)


def received(line: socket.socket, seconds: float) -> int:
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        count += len(line.recv(1 << 18))
    return count


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = socket.create_server(("0.0.0.0", _PORT))
    server.settimeout(_WITHIN_S)
    threading.Thread(target=send, args=[f"10.79.0.{(rank + 1) % world + 1}"], daemon=True).start()
    line, _address = server.accept()
    received(line, _SETTLES_S)
    rate = received(line, _COUNTED_S) / _COUNTED_S
    received(line, _SETTLES_S)  # the others count still
    if rank == 0:
        with open(os.path.join(sys.argv[1], "taken.json"), "w") as file:
            json.dump(rate, file)


if __name__ == "__main__":
    main()
