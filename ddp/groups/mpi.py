"""A rank that mpirun has started: its place and the address of the store, exchanged through MPI."""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from ddp.groups import ring
from ddp.groups.place import InitError, Seat

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

_LOOPBACK = "127.0.0.1"


def library() -> Any:
    """Import mpi4py.MPI, which initializes MPI."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise InitError(
            f"cannot load mpi4py: {error}. ddp.init() needs it, because mpirun started this script. Install mpi4py, "
            "and an MPI if there is none (pip install mpi4py mpich), or start the script with ddp-launch"
        ) from error


def seat() -> Seat:
    mpi = library()
    world = mpi.COMM_WORLD
    here = world.Split_type(mpi.COMM_TYPE_SHARED)
    first = here.bcast(world.rank)
    hosts = sorted(set(world.allgather(first)))
    taken = Seat(world.rank, world.size, here.rank, here.size, hosts.index(first), launched=True)
    here.Free()
    return taken


def meeting(timeout: timedelta) -> tuple[str, Store]:
    """Create the store on rank 0, on a port that the system chooses; return its address and the store."""
    world = library().COMM_WORLD
    first = world.rank == 0
    hosts = world.allgather(socket.gethostname())
    elsewhere = [host for host in hosts if host != hosts[0]]
    address = world.bcast(
        (ring.facing(elsewhere[0]) or socket.gethostname()) if first and elsewhere else _LOOPBACK
    )
    kept = TCPStore(address, 0, None, True, timeout, wait_for_workers=False) if first else None
    port = world.bcast(kept.port if kept is not None else 0)
    return address, kept or TCPStore(address, port, None, False, timeout, wait_for_workers=False)
