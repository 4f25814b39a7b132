"""A rank that mpirun has started: get its rank, local rank and world size from MPI, and create the store."""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore

from ddp.groups import ring
from ddp.groups.rank_info import InitError, RankInfo

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

_LOOPBACK = "127.0.0.1"


def library() -> Any:
    """Import mpi4py.MPI, which initializes MPI."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise InitError(
            f"cannot load mpi4py: {error}. A script that mpirun has started needs it. Run `pip install mpi4py mpich`, "
            "or start the script with ddp-launch"
        ) from error


def rank_info() -> RankInfo:
    mpi = library()
    world = mpi.COMM_WORLD
    here = world.Split_type(mpi.COMM_TYPE_SHARED)
    first = here.bcast(world.rank)
    hosts = sorted(set(world.allgather(first)))
    taken = RankInfo(world.rank, world.size, here.rank, here.size, hosts.index(first), launched=True)
    here.Free()
    return taken


def create_store(timeout: timedelta) -> tuple[str, Store]:
    """Create the store on rank 0, on a port that the system chooses. Return the address of rank 0 and the store."""
    world = library().COMM_WORLD
    first = world.rank == 0
    hosts = world.allgather(socket.gethostname())
    elsewhere = [host for host in hosts if host != hosts[0]]
    address = world.bcast(
        (ring.source_address(elsewhere[0]) or socket.gethostname()) if first and elsewhere else _LOOPBACK
    )
    kept = TCPStore(address, 0, None, True, timeout, wait_for_workers=False) if first else None
    port = world.bcast(kept.port if kept is not None else 0)
    return address, kept or TCPStore(address, port, None, False, timeout, wait_for_workers=False)
