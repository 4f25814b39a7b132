"""A rank's place in the job: read from the environment that a launcher has made, or that of a process alone.

The variables are torchrun's. A script started without any launcher has none of them and is a world of one; one that
mpirun has started is told its place by MPI.
Some but not all of them is somebody's mistake, and is said to be one: half a world would wait for the other
half for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    "start the script with ddp-launch, or set all of them (without any of them it is a world of one process)"
)


class InitError(RuntimeError):
    """The process group cannot be made from what the environment and the arguments say."""


@dataclass(frozen=True, slots=True)
class Seat:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    launched: bool  # a launcher has said so; else the process is alone

    @property
    def on_one_node(self) -> bool:
        return self.world_size == self.local_world_size


ALONE = Seat(0, 1, 0, 1, 0, launched=False)


# What Open MPI, MPICH and its kin, and PMIx tell each process that they start.
_SIGNS_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")


def started_by_mpi(environ: Mapping[str, str]) -> bool:
    """By mpirun, and by no launcher that says what torch wants to know."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return False
    return any(environ.get(name) for name in _SIGNS_OF_MPI)


def seat_of(environ: Mapping[str, str]) -> Seat:
    if not any(name in environ for name in ("RANK", "WORLD_SIZE")):
        return ALONE
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise InitError(f"{', '.join(missing)}: not in the environment; {_CURE}")
    _number(environ, "MASTER_PORT", 1, 65536)
    world_size = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0, world_size)
    local_world = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size + 1, default=str(world_size))
    local_rank = _number(environ, "LOCAL_RANK", 0, default=str(rank % local_world))
    node_rank = _number(environ, "GROUP_RANK", 0, default=str(rank // local_world))
    return Seat(rank, world_size, local_rank, local_world, node_rank, launched=True)


def _number(
    environ: Mapping[str, str], name: str, least: int, limit: int | None = None, default: str | None = None
) -> int:
    text = environ.get(name) or default or ""
    wanted = f"a number from {least}" if limit is None else f"a number from {least} to {limit - 1}"
    if not text.isascii() or not text.isdigit():
        raise InitError(f"{name}={text!r} in the environment is not {wanted}; {_CURE}")
    value = int(text)
    if value < least or (limit is not None and value >= limit):
        world = "" if name == "WORLD_SIZE" else f" (WORLD_SIZE={environ['WORLD_SIZE']})"
        raise InitError(f"{name}={text} in the environment is not {wanted}{world}; {_CURE}")
    return value


def device_index(seat: Seat, n_devices: int, kind: str) -> int:
    """Which of the node's devices is this rank's own. One visible device is the rank's own, whatever its number."""
    if n_devices == 1:
        return 0
    if seat.local_rank < n_devices:
        return seat.local_rank
    raise InitError(
        f"LOCAL_RANK={seat.local_rank}, but this process sees {n_devices} {kind} devices; "
        "start no more ranks per node than that (--nproc-per-node), or say which one: ddp.init(device=...)"
    )


def seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InitError(f"{name}={text!r} is not a number of seconds above 0")
    return value


def known_backend(asked: str, known: Iterable[str]) -> str:
    """`gloo`, or one for each kind of device, as torch writes it: `cpu:gloo,cuda:nccl`."""
    names = [part.rpartition(":")[2] for part in asked.lower().split(",")]
    there = sorted(known)
    for name in names:
        if name not in there:
            raise InitError(f"there is no backend {name!r} here; this torch has {', '.join(there)}")
    return asked.lower()
