"""The store through which the ranks of a generation connect, kept by its own process.

No rank owns it, so it outlives whichever rank ends first. It listens before any rank starts, so no rank has to back
off. Each generation gets a new one, so it holds nothing of a failed attempt.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

_BACKLOG = 4096
_MAX_REASON = 1000  # bytes


def bound_socket(host: str, port: int, listen: bool) -> socket.socket:
    """Raise OSError if `host` is not an address of this machine."""
    family, _type, _proto, _name, address = socket.getaddrinfo(
        host or "127.0.0.1", port, type=socket.SOCK_STREAM
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    if listen:
        sock.listen(_BACKLOG)
    return sock


def keep(sock: socket.socket, host: str, error_fd: int) -> None:
    """Serve the store on this socket until killed. If that fails, write the reason to `error_fd`, and end."""
    try:
        server = _server(sock, host)
    except Exception as error:
        os.write(error_fd, f"{type(error).__name__}: {error}".encode(errors="replace")[:_MAX_REASON])
        os._exit(1)
    while server is not None:
        signal.pause()  # until the zygote sends SIGKILL


def _server(sock: socket.socket, host: str) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    port = sock.getsockname()[1]
    return dist.TCPStore(
        host or "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=sock.detach(),
    )


def join_instead_of_hosting() -> None:
    """Connect a script that creates a TCPStore server at MASTER_ADDR:MASTER_PORT to the launcher's store instead."""
    import torch.distributed as dist

    original = dist.TCPStore.__init__

    def init(self: Any, host_name: str, port: int, *args: Any, **kwargs: Any) -> None:
        if str(port) == os.environ.get("MASTER_PORT"):
            if "is_master" in kwargs:
                kwargs["is_master"] = False
            elif len(args) > 1:
                args = (args[0], False, *args[2:])
        original(self, host_name, port, *args, **kwargs)

    dist.TCPStore.__init__ = init  # type: ignore[method-assign]
