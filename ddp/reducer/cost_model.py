"""What is cheap on a device and a transport: device type, backend and its capabilities -> CostModel.

On a CPU the copy of a gradient is memory traffic. The gradient that has just been computed is in the cache, so small
chunks are copied early. A large gradient is divided while it is copied, because a second pass would read it again.

On an accelerator each call starts a kernel, and the calls of the host limit the speed. A bucket is therefore one chunk:
it needs one hook, one check, and one call for all of its copies. If the backend averages by itself (NCCL), gradients
are not divided at all.

The sizes from which a gradient is averaged in place, without a copy, are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB, _MIB = 1024, 1024 * 1024
_NO_LIMIT = 2**63 - 1
# Backends of torch whose all-reduce knows AVG. NCCL divides before it sums, so half precision does not overflow.
_AVERAGING_BACKENDS = frozenset({"nccl"})


@dataclass(frozen=True)
class Capabilities:
    """What a process group offers besides a plain sum.

    `averages`: it says itself that its all-reduce knows AVG. `allocates`: it can allocate buckets in memory that its
    transport has registered, and the user wants this.
    """

    averages: bool = False
    allocates: bool = False


@dataclass(frozen=True)
class CostModel:
    """The sizes in bytes at which one way becomes cheaper than another, and which ways are used."""

    # A chunk of a bucket is gathered when it has at least this size. With smaller ones, a hook and two calls cost more
    # than they save.
    chunk: int
    # Gradients of this mean size are scaled one by one during the copy. Smaller ones are copied together.
    scaled_alone: int
    # Below this size a copy costs less than a separate collective.
    min_in_place: int = _MIB
    # From this size a separate collective costs less, whatever the bucket size, if the group does not take lists.
    always_in_place: int = 8 * _MIB
    # Up to this size a model does not need buckets if the group takes lists. A larger one gains from copies in cache.
    small_model: int = 6 * _MIB
    average_in_collective: bool = False  # the all-reduce divides, instead of a pass over the bucket
    registered_memory: bool = False  # buckets are in memory that the transport has registered


def choose(device_type: str, backend: str, offered: Capabilities) -> CostModel:
    """Return the costs of a device type (`cpu`, `cuda`, ...) with a backend (`gloo`, `nccl`, ...)."""
    averages = offered.averages or backend in _AVERAGING_BACKENDS
    if device_type == "cpu":
        return CostModel(chunk=128 * _KIB, scaled_alone=16 * _KIB, average_in_collective=averages)
    return CostModel(
        chunk=_NO_LIMIT,
        scaled_alone=_NO_LIMIT,
        average_in_collective=averages,
        registered_memory=offered.allocates,
    )
