"""gRPC in our processes: which of its two I/O engines it uses (the older one, where both are there), and its silence.

gRPC 1.85 polls through its "event engine", whose hand-overs between threads cost Python processes dearly: with
the poller before it, a thousand heartbeats a second cost two thirds of the CPU time, and a thousand joins three
quarters of the time. The choice is read from the environment when gRPC is imported, so it is made before;
who has chosen already is left alone, and versions that were not tried take what they take.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_TRIED = "1.85."
_CHOICE = "-event_engine_listener,-event_engine_client"


@cache  # to ask for the version is to read a file
def choose_engine() -> None:
    """Before anything imports grpc; later it has no effect."""
    try:
        tried = version("grpcio").startswith(_TRIED)
    except PackageNotFoundError:
        return
    if tried:
        os.environ.setdefault("GRPC_EXPERIMENTS", _CHOICE)


def hush() -> None:
    """What goes wrong we say ourselves, in fewer words. Before anything imports grpc, in processes of our own only."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
