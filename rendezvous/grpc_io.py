"""Settings of gRPC in our processes: which I/O engine it uses, and that it does not log.

gRPC 1.85 polls with its "event engine", which passes work between threads. That is expensive for Python. With the older
poller, 1,000 heartbeats per second need a third less CPU time, and 1,000 joins a quarter less time. gRPC reads the
setting from the environment when it is imported, so we set it before. A value that the user has set is kept, and
versions that were not measured keep their default.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

_TRIED = "1.85."
_NOT_REACHED = re.compile(r"failed to connect to all addresses.*: ([^:]*?)(?: \(\d+\))?$", re.DOTALL)
_NO_HOST = re.compile(r"(?:errors resolving|DNS resolution failed for) (.+?):\d+: ")
_CHOICE = "-event_engine_listener,-event_engine_client"


@cache  # reading the version reads a file
def choose_engine() -> None:
    """Select the older poller. Call it before grpc is imported; later it has no effect."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        tried = version("grpcio").startswith(_TRIED)
    except PackageNotFoundError:
        return
    if tried:
        os.environ.setdefault("GRPC_EXPERIMENTS", _CHOICE)


def silence_grpc() -> None:
    """Turn gRPC's log off, since we report errors ourselves. Call it before grpc is imported.

    Only for `ddp-launch`, `ddpctl` and `ddp-rendezvous`, not for a process of a user.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def reason_of(error: Any) -> str:
    """Why a call failed: what the service says, or the end of gRPC's own chain of reasons."""
    details = str(error.details() or "")
    if found := _NOT_REACHED.match(details):
        return found[1].lower()
    if found := _NO_HOST.match(details):
        return f"there is no host {found[1]}"
    return details or f"the service gave no reason (gRPC status {error.code().name})"
