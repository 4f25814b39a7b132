"""`ddp.init()`: the default process group, from what the launcher says, or of one process alone.

A script that was started without a launcher is a world of one: its store lives in this process, and no port is opened
for it. One that mpirun has started learns its place, and where the store is, through MPI. The backend can be named in
the call or in DDP_BACKEND; what is not named is chosen by what there is.
"""

from __future__ import annotations

import importlib
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ddp.groups import backends, core_loading, mpi
from ddp.groups.place import (
    ALONE,
    InitError,
    Seat,
    device_index,
    known_backend,
    seat_of,
    seconds,
    started_by_mpi,
)
from ddp.telemetry import guard, torch_marks
from ddp.telemetry.comm_error import explained

if TYPE_CHECKING:
    from collections.abc import Iterator

_BACKEND, _TIMEOUT = "DDP_BACKEND", "DDP_TIMEOUT_S"
_LOOPBACK = "lo"
_MEET_WITHIN = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is in the job, and what it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str


_place: Place | None = None  # of the group that init() made, for as long as it is there
_asked: tuple[Any, ...] = ()


def init(
    backend: str = "auto",
    *,
    device: torch.device | str | int | None = None,
    timeout: timedelta | float | None = None,
) -> Place:
    """Makes the default process group, once; called again it says the same.

    `backend`: auto, or any that torch knows or that has been registered with it (gloo, nccl, cpu:gloo,cuda:nccl); mpi
    is torch's own where it was built with it, else goes through mpi4py.
    `device`: cpu, cuda, or one device; otherwise this rank's own accelerator if there is one. `timeout`: of a
    collective, in seconds.
    """
    global _place, _asked
    asked = (backend, device, timeout)
    if dist.is_initialized():
        if _place is None:
            _place, _asked = _made_elsewhere(backend, device), asked
        elif asked not in (_asked, ("auto", None, None)):
            raise InitError(
                f"ddp.init() has made a group before, with {_place.backend} on {_place.device}; "
                "say the same again, or ddp.shutdown() first"
            )
        return _place
    by_mpi = started_by_mpi(os.environ)
    seat = mpi.seat() if by_mpi else seat_of(os.environ)
    where = _device(seat, device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    chosen = _backend(backend, seat, where)
    torch_marks.install()
    watching = guard.start()
    with explained("the meeting of all ranks"):
        _make_group(chosen, seat, where, _limit(timeout), by_mpi)
    watching.wake()
    _place, _asked = _described(seat, where, chosen), asked
    return _place


def shutdown() -> None:
    """Takes the default process group apart, if there is one."""
    global _place
    _place = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _made_elsewhere(backend: str, device: torch.device | str | int | None) -> Place:
    """The script has called torch's init_process_group itself: that group is taken as it is."""
    there = dist.get_backend_config() if hasattr(dist, "get_backend_config") else dist.get_backend()
    if backend not in ("auto", dist.get_backend(), str(there)):
        raise InitError(
            f"the process group there is of {dist.get_backend()}, not of {backend}; make one of them"
        )
    seat = seat_of(os.environ)
    if seat == ALONE:
        seat = Seat(
            dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), 0, launched=False
        )
    return _described(seat, _device(seat, device), dist.get_backend())


def _described(seat: Seat, device: torch.device, backend: str) -> Place:
    return Place(
        dist.get_rank(),
        dist.get_world_size(),
        seat.local_rank,
        seat.local_world_size,
        seat.node_rank,
        device,
        backend,
    )


# --- on what, over what ------------------------------------------------------------------------------


def _device(seat: Seat, asked: torch.device | str | int | None) -> torch.device:
    if isinstance(asked, int):
        return torch.device("cuda", asked)
    device = torch.device(asked) if asked is not None else _accelerator()
    if device.type == "cpu" or ":" in str(device):
        return device
    module = torch.get_device_module(device.type)
    n_devices = module.device_count()
    if not n_devices:
        raise InitError(f"there is no {device.type} device here; ddp.init(device='cpu') computes on the CPU")
    return torch.device(device.type, device_index(seat, n_devices, device.type))


def _accelerator() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    accelerator = getattr(torch, "accelerator", None)  # not in every torch that this runs with
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator())
    return torch.device("cpu")


def _backend(asked: str, seat: Seat, device: torch.device) -> str:
    asked = os.environ.get(_BACKEND, "auto") if asked == "auto" else asked
    if asked != "auto":
        if asked == "mpi" and not dist.is_mpi_available():
            asked = "mpi4py"
        _register_ours(asked)
        return known_backend(asked, dist.Backend.backend_list)
    if device.type == "cpu":
        has_native = core_loading.native() is not None
        chosen = backends.choose(seat.world_size, seat.local_world_size, has_native)
        _register_ours(chosen)
        return chosen
    native = dist.Backend.default_device_backend_map.get(device.type)
    if native is None:
        raise InitError(f"no backend is known for {device.type}; name one: ddp.init(backend=...)")
    return f"cpu:gloo,{device.type}:{native}"


def _register_ours(backend: str) -> None:
    """Makes our own known to torch.distributed: importing ddp.groups.shm does that for `shm` and `hier`."""
    names = set(re.split("[:,]", backend))
    if {"shm", "hier"} & names:
        importlib.import_module("ddp.groups.shm")
    if "mpi4py" in names:
        mpi.library()
        importlib.import_module("ddp.groups.mpi_group").register()


def _limit(timeout: timedelta | float | None) -> timedelta | None:
    if isinstance(timeout, timedelta):
        return timeout
    if timeout is None:
        text = os.environ.get(_TIMEOUT)
        return timedelta(seconds=seconds(text, _TIMEOUT)) if text else None
    return timedelta(seconds=seconds(str(timeout), "timeout"))


# --- making it -----------------------------------------------------------------------------------------


def _make_group(
    backend: str, seat: Seat, device: torch.device, timeout: timedelta | None, by_mpi: bool
) -> None:
    how: dict[str, Any] = {"backend": backend, "rank": seat.rank, "world_size": seat.world_size}
    if timeout is not None:
        how["timeout"] = timeout
    if device.type == "cuda":
        how["device_id"] = device
    if by_mpi:
        address, store = mpi.meeting(timeout or _MEET_WITHIN)
        os.environ.setdefault("MASTER_ADDR", address)  # the ring of `hier` goes where this is seen from
        dist.init_process_group(store=store, **how)
        return
    if seat.launched:
        dist.init_process_group(init_method="env://", **how)
        return
    with _gloo_stays_here():
        dist.init_process_group(store=HashStore(), **how)


@contextmanager
def _gloo_stays_here() -> Iterator[None]:
    """Gloo listens even when it has nobody to talk to: then at least where nobody from outside can."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
