"""The store through which the ranks of a generation connect, kept by its own process.

No rank owns it, so it outlives whichever rank ends first. It listens before any rank starts, so no rank has to back
off. Each generation gets a new one, so it holds nothing of a failed attempt.

The process is a fork of a zygote that has torch. Behind a plain zygote it executes this file.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

_BACKLOG = 4096
_MAX_REASON = 1000  # bytes
NO_TORCH = 3  # exit code: whoever keeps the store has no torch, and so has no rank that could use it


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


# --- behind a plain zygote ---------------------------------------------------------------------------
#
# It loads torch's library and the functions that the store needs, in a fifth of the time of `import torch`. If this
# torch cannot be loaded like that, it is imported.


def _main(folder: str, fd: str, host: str, error_fd: str, whole: str = "") -> None:
    """`folder`: where torch is; "": where the interpreter finds it."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    if folder and not whole:
        sys.path.insert(0, folder)
    if not whole and not _load_library():
        os.execv(sys.executable, (sys.executable, "-u", *sys.argv, "whole"))
    if whole and not _imports_torch():
        os._exit(NO_TORCH)
    keep(socket.socket(fileno=int(fd)), host, int(error_fd))


def _imports_torch() -> bool:
    """Where its import fails, ranks cannot use the store either, and may not need it."""
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        return False
    return True


def _load_library() -> bool:
    """Whether `torch.distributed` has the store now. The packages are empty but for that."""
    from importlib import import_module
    from importlib.util import find_spec

    found = find_spec("torch")
    if found is None or found.submodule_search_locations is None:
        return False
    torch: Any = type(sys)("torch")
    distributed: Any = type(sys)("torch.distributed")
    torch.__path__, torch.__spec__ = list(found.submodule_search_locations), found
    sys.modules["torch"] = torch
    try:
        library: Any = import_module("torch._C")
        sys.modules["torch.distributed"] = torch.distributed = distributed
        library._c10d_init()
        distributed.TCPStore = library._distributed_c10d.TCPStore
    except Exception:  # of another release of torch, or no real one
        return False
    return True


if __name__ == "__main__":
    _main(*sys.argv[1:])
