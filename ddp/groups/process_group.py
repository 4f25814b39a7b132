"""`ddp.init()`: create the default process group, for a launched job or for a single process.

A script without a launcher is a world of one rank. Its store is in this process, without an open port. A script that
mpirun has started gets its rank and the address of the store through MPI. The call or DDP_BACKEND names the backend.
Otherwise it is chosen from the available hardware.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore

from ddp.groups import accelerator, core_loading, rank_info, ring
from ddp.groups.rank_info import (
    ALONE,
    InitError,
    RankInfo,
    device_index,
    known_backend,
    parse_rank_info,
    seconds,
    started_by_mpi,
)
from ddp.telemetry import guard, torch_marks
from ddp.telemetry.comm_error import explaining
from ddp.telemetry.contracts import BACKEND, TIMEOUT_S

# --- ranks that mpirun has started -----------------------------------------------------------------
#
# A rank that mpirun has started: get its rank, local rank and world size from MPI, and create the store.

_LOOPBACK_ADDRESS = "127.0.0.1"


def mpi_library() -> Any:
    """Import mpi4py.MPI, which initializes MPI."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise InitError(
            f"cannot load mpi4py: {error}. A script that mpirun has started needs it. Run `pip install mpi4py mpich`, "
            "or start the script with ddp-launch"
        ) from error


def mpi_rank_info() -> RankInfo:
    mpi = mpi_library()
    world = mpi.COMM_WORLD
    here = world.Split_type(mpi.COMM_TYPE_SHARED)
    first = here.bcast(world.rank)
    hosts = sorted(set(world.allgather(first)))
    taken = RankInfo(world.rank, world.size, here.rank, here.size, hosts.index(first), launched=True)
    here.Free()
    return taken


def mpi_store(timeout: timedelta) -> tuple[str, Store]:
    """Create the store on rank 0, on a port that the system chooses. Return the address of rank 0 and the store."""
    world = mpi_library().COMM_WORLD
    first = world.rank == 0
    hosts = world.allgather(socket.gethostname())
    elsewhere = [host for host in hosts if host != hosts[0]]
    address = world.bcast(
        (ring.source_address(elsewhere[0]) or socket.gethostname())
        if first and elsewhere
        else _LOOPBACK_ADDRESS
    )
    kept = TCPStore(address, 0, None, True, timeout, wait_for_workers=False) if first else None
    port = world.bcast(kept.port if kept is not None else 0)
    return address, kept or TCPStore(address, port, None, False, timeout, wait_for_workers=False)


# --- init ------------------------------------------------------------------------------------------

_LOOPBACK = "lo"
_MEET_WITHIN = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process in the job, its device, and its backend."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str


_place: Place | None = None  # of the group that init() created, until shutdown()
_asked: tuple[Any, ...] = ()
_is_chosen = False  # whether init() has chosen between our own backends


def init(
    backend: str = "auto",
    *,
    device: torch.device | str | int | None = None,
    timeout: timedelta | float | None = None,
) -> Place:
    """Create the default process group. Later calls return the same result.

    `backend`: "auto", the name of a torch backend (gloo, nccl, cpu:gloo,cuda:nccl), or the name of a backend that is
    registered with torch. mpi is torch's own backend if torch was built with it, otherwise mpi4py. `device`: cpu, the
    type of an accelerator (cuda, xpu, ...), one device, or the index of one; by default this rank's own accelerator, if
    there is one. `timeout`: of a collective, in seconds.
    """
    global _place, _asked, _is_chosen
    asked = (backend, device, timeout)
    if dist.is_initialized():
        if _place is None:
            _place, _asked = _use_existing_group(backend, device), asked
        elif asked not in (_asked, ("auto", None, None)):
            raise InitError(
                f"ddp.init() was called with other arguments: the group uses {_place.backend} on {_place.device}. "
                "Use the same arguments, or call ddp.shutdown() first"
            )
        return _place
    by_mpi = started_by_mpi(os.environ)
    info = mpi_rank_info() if by_mpi else parse_rank_info(os.environ)
    where = _device(info, device)
    if where.type != "cpu":
        torch.accelerator.set_device_index(where)
    chosen = _backend(backend, info, where)
    torch_marks.install()
    our_guard = guard.start()
    with explaining("the initial rendezvous"), guard.creating_group():
        _make_group(chosen, info, where, _limit(timeout), by_mpi)
    our_guard.wake()
    _place, _asked = _make_place(info, where, chosen), asked
    _is_chosen = _names_none(backend) and where.type == "cpu"
    return _place


def chosen_now() -> str:
    """The backend that init() would choose now, where the environment says how many ranks are on this node.

    "" if the script or the user has named the backend, or has created the group.
    """
    if _place is None or not _is_chosen:
        return ""
    return _backend("auto", parse_rank_info(os.environ), _place.device)


def moved(backend: str = "") -> None:
    """The groups were formed again, perhaps with another rank of this process: let init() return the new place.

    `backend`: the one that init() would choose now.
    """
    global _place
    if _place is not None:
        _place = _make_place(parse_rank_info(os.environ), _place.device, backend or _place.backend)


def shutdown() -> None:
    """Destroy the default process group, if there is one."""
    global _place, _is_chosen
    _place, _is_chosen = None, False
    if dist.is_initialized():
        dist.destroy_process_group()


def _use_existing_group(backend: str, device: torch.device | str | int | None) -> Place:
    """Use the group that the script created with torch's init_process_group."""
    there = dist.get_backend_config() if hasattr(dist, "get_backend_config") else dist.get_backend()
    if backend not in ("auto", dist.get_backend(), str(there)):
        raise InitError(
            f"cannot use backend {backend!r}: the process group of torch.distributed exists already, with backend "
            f"{dist.get_backend()!r}. Create the group only once, or use the same backend"
        )
    info = parse_rank_info(os.environ)
    if info == ALONE:
        info = RankInfo(
            dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), 0, launched=False
        )
    return _make_place(info, _device(info, device), dist.get_backend())


def _make_place(info: RankInfo, device: torch.device, backend: str) -> Place:
    return Place(
        dist.get_rank(),
        dist.get_world_size(),
        info.local_rank,
        info.local_world_size,
        info.node_rank,
        device,
        backend,
    )


# --- device and backend ------------------------------------------------------------------------------


def _device(info: RankInfo, asked: torch.device | str | int | None) -> torch.device:
    if isinstance(asked, int):
        return torch.device(_accelerator_or_raise().type, asked)
    device = torch.device(asked) if asked is not None else accelerator.current() or torch.device("cpu")
    if device.type == "cpu" or ":" in str(device):
        return device
    module = torch.get_device_module(device.type)
    n_devices = module.device_count()
    if not n_devices:
        raise InitError(f"no {device.type} device is available. Use ddp.init(device='cpu') to run on the CPU")
    return torch.device(device.type, device_index(info, n_devices, device.type))


def _accelerator_or_raise() -> torch.device:
    device = accelerator.current()
    if device is None:
        raise InitError(
            "no accelerator is available, so a device cannot be named by its index alone. Use ddp.init(device='cpu') "
            "to run on the CPU"
        )
    return device


def _names_none(asked: str) -> bool:
    """Whether neither the call nor the user names a backend."""
    return asked == "auto" and os.environ.get(BACKEND, "auto") == "auto"


def _backend(asked: str, info: RankInfo, device: torch.device) -> str:
    if not _names_none(asked):
        asked = os.environ[BACKEND] if asked == "auto" else asked
        if asked == "mpi" and not dist.is_mpi_available():
            asked = "mpi4py"
        _register_ours(asked)
        return known_backend(asked, dist.Backend.backend_list)
    if device.type == "cpu":
        has_native = core_loading.native() is not None
        chosen = rank_info.choose(info.world_size, info.local_world_size, has_native)
        _register_ours(chosen)
        return chosen
    native = dist.Backend.default_device_backend_map.get(device.type)
    if native is None:
        known = ", ".join(sorted(dist.Backend.backend_list))
        raise InitError(
            f"torch has no default backend for {device.type}. Use ddp.init(backend=...) with one of {known}"
        )
    return f"cpu:gloo,{device.type}:{native}"


def _register_ours(backend: str) -> None:
    """Register our own backends with torch.distributed. Importing ddp.groups.shm registers `shm` and `hier`."""
    names = set(re.split("[:,]", backend))
    if {"shm", "hier"} & names:
        importlib.import_module("ddp.groups.shm")
    if "mpi4py" in names:
        from _ddp_launch_entry import BACKEND, find

        find(BACKEND, "mpi4py")()


def _limit(timeout: timedelta | float | None) -> timedelta | None:
    if isinstance(timeout, timedelta):
        return timeout
    if timeout is None:
        text = os.environ.get(TIMEOUT_S)
        return timedelta(seconds=seconds(text, TIMEOUT_S)) if text else None
    return timedelta(seconds=seconds(str(timeout), "timeout"))


# --- creation ------------------------------------------------------------------------------------------


def _make_group(
    backend: str, info: RankInfo, device: torch.device, timeout: timedelta | None, by_mpi: bool
) -> None:
    how: dict[str, Any] = {"backend": backend, "rank": info.rank, "world_size": info.world_size}
    if timeout is not None:
        how["timeout"] = timeout
    if device.type != "cpu":
        how["device_id"] = device
    if by_mpi:
        address, store = mpi_store(timeout or _MEET_WITHIN)
        os.environ.setdefault(
            "MASTER_ADDR", address
        )  # the ring of `hier` uses the interface that leads there
        dist.init_process_group(store=store, **how)
        return
    if info.launched:
        dist.init_process_group(init_method="env://", **how)
        return
    with _gloo_on_loopback():
        dist.init_process_group(store=HashStore(), **how)


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Restrict Gloo to the loopback interface: it opens a port even in a world of one rank."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
