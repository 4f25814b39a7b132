"""Group gradients into buckets and order the buckets: parameters and limits -> BucketPlan.

One collective averages the gradients of a bucket. Every rank launches the buckets in the order of the plan. The plan
is therefore a pure function of values that are equal on all ranks.

The first plan is made before any backward. It takes the parameters in the order of registration and the buckets in
reverse, because gradients arrive roughly last layer first. It holds one bucket per device and dtype, unless the reducer
searches for unused parameters. The backward of a model may run its own collectives. Before the ranks have agreed on an
order, buckets must not be sent between them. The rebuilt plan follows the order in which the gradients of rank 0
arrived. Its first bucket is small, so that communication starts early.

A FLAT bucket copies its gradients side by side into one tensor. An IN_PLACE bucket averages its gradients in place,
which avoids the copy and needs no memory. A SPARSE bucket has one gradient, which is a sparse tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ddp.telemetry.coded import WrongValue

Entry = tuple[str, Sequence[int], str]

# --- costs -----------------------------------------------------------------------------------------
#
# What is cheap on a device and a transport: device type, backend and its capabilities -> CostModel.
#
# On a CPU the copy of a gradient is memory traffic. The gradient that has just been computed is in the cache, so
# small chunks are copied early. A large gradient is divided while it is copied, because a second pass would read it
# again.
#
# On an accelerator each call starts a kernel, and the calls of the host limit the speed. A bucket is therefore one
# chunk: it needs one hook, one check, and one call for all of its copies. If the backend averages by itself (NCCL),
# gradients are not divided at all.
#
# The sizes from which a gradient is averaged in place, without a copy, are the same everywhere.

_KIB, _MIB = 1024, 1024 * 1024
_NO_LIMIT = 2**63 - 1
# Backends of torch whose all-reduce knows AVG. NCCL divides before it sums, so half precision does not overflow.
# From 2.15 on, the backend that a script asks for as `nccl` calls itself `nccl2`.
_AVERAGING_BACKENDS = frozenset({"nccl", "nccl2", "nccl-lazy"})


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


# --- the plan --------------------------------------------------------------------------------------

MIB = 1024 * 1024
_SAME_MODEL = "Wrap the same model on all ranks."


class Kind(Enum):
    """How a bucket stores its gradients."""

    FLAT = "flat"
    IN_PLACE = "in place"
    SPARSE = "sparse"


@dataclass(frozen=True)
class ParameterInfo:
    """The properties of a parameter that a plan depends on. `strides` is the layout of its gradient."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    itemsize: int
    sparse: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Limits:
    """The sizes in bytes at which a bucket is closed, one per bucket of a dtype and device.

    The last number applies to all further buckets.
    """

    first: tuple[int, ...]
    rebuilt: tuple[int, ...]

    @property
    def largest(self) -> int:
        return max(self.rebuilt)


@dataclass(frozen=True)
class Transport:
    """The capabilities of the process group.

    `lists`: one call averages many tensors without a copy. `in_place`: gradients may be averaged in place. This is
    false with a communication hook, gradients of another dtype, or bucket views, because these need one flat buffer.
    """

    lists: bool = False
    in_place: bool = True
    costs: CostModel = field(default_factory=lambda: choose("cpu", "gloo", Capabilities()))


@dataclass(frozen=True)
class Bucket:
    """Gradients that one collective averages."""

    members: tuple[int, ...]  # indices of parameters, in their order in the bucket
    kind: Kind


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a model, in launch order."""

    buckets: tuple[Bucket, ...]


def limits(cap_bytes: int, first_bytes: int, per_bucket: Sequence[int], *, whole_at_first: bool) -> Limits:
    """Return the size limits. `whole_at_first`: the first plan holds one bucket per device and dtype."""
    if per_bucket:
        return Limits(tuple(per_bucket), tuple(per_bucket))
    stepped = (first_bytes, cap_bytes) if first_bytes < cap_bytes else (cap_bytes,)
    return Limits((_NO_LIMIT,) if whole_at_first else stepped, (first_bytes, cap_bytes))


def first_plan(parameters: Sequence[ParameterInfo], limit: Limits, transport: Transport) -> BucketPlan:
    groups = _separate(parameters, range(len(parameters)), limit, transport, limit.first)
    groups.sort(key=min)
    return BucketPlan(tuple(_bucket(parameters, group, limit, transport) for group in reversed(groups)))


def rebuilt_plan(
    parameters: Sequence[ParameterInfo], arrival: Sequence[int], limit: Limits, transport: Transport
) -> BucketPlan:
    """Make the plan from the gradient order of a backward. `arrival` has every parameter once."""
    if sorted(arrival) != list(range(len(parameters))):
        raise WrongValue("internal error: the order of arrival must contain every parameter once")
    place = {member: i for i, member in enumerate(arrival)}
    groups = _separate(parameters, arrival, limit, transport, limit.rebuilt)
    # A bucket is complete when its last member arrives. Order by that, so that buckets do not wait for later ones.
    groups.sort(key=lambda group: max(place[i] for i in group))
    return BucketPlan(tuple(_bucket(parameters, group, limit, transport) for group in groups))


def _separate(
    parameters: Sequence[ParameterInfo],
    order: Sequence[int],
    limit: Limits,
    transport: Transport,
    sizes: Sequence[int],
) -> list[list[int]]:
    """Return each large parameter alone, and the others in groups."""
    large = [i for i in order if _is_large(parameters[i], limit, transport)]
    apart = set(large)
    return [*([i] for i in large), *_group(parameters, [i for i in order if i not in apart], sizes)]


def _is_large(facts: ParameterInfo, limit: Limits, transport: Transport) -> bool:
    enough = max(limit.largest, transport.costs.min_in_place)
    if not transport.lists:
        enough = min(enough, transport.costs.always_in_place)
    return transport.in_place and not facts.sparse and facts.nbytes >= enough


def _group(
    parameters: Sequence[ParameterInfo], order: Iterable[int], sizes: Sequence[int]
) -> list[list[int]]:
    closed: list[list[int]] = []
    open_: dict[tuple[str, str], list[int]] = {}
    filled: dict[tuple[str, str], int] = {}
    step: dict[tuple[str, str], int] = {}
    for i in order:
        facts = parameters[i]
        if facts.sparse:
            closed.append([i])
            continue
        key = (facts.dtype, facts.device)
        open_.setdefault(key, []).append(i)
        filled[key] = filled.get(key, 0) + facts.nbytes
        if filled[key] >= sizes[min(step.get(key, 0), len(sizes) - 1)]:
            closed.append(open_.pop(key))
            filled[key] = 0
            step[key] = step.get(key, 0) + 1
    return closed + list(open_.values())


def _bucket(
    parameters: Sequence[ParameterInfo], members: Sequence[int], limit: Limits, transport: Transport
) -> Bucket:
    if parameters[members[0]].sparse:
        return Bucket(tuple(members), Kind.SPARSE)
    alone = len(members) == 1 and _is_large(parameters[members[0]], limit, transport)
    small = transport.lists and sum(facts.nbytes for facts in parameters) <= transport.costs.small_model
    in_place = alone or (small and transport.in_place)
    return Bucket(tuple(members), Kind.IN_PLACE if in_place else Kind.FLAT)


# --- chunks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Adjacent gradients of a bucket that are gathered together: its members [start, end), as parameter indices."""

    bucket: int
    start: int
    end: int
    members: tuple[int, ...]


def cut(plan: BucketPlan, parameters: Sequence[ParameterInfo], chunk_bytes: int) -> list[Chunk]:
    """Cut each flat bucket into chunks of at least `chunk_bytes`, except for its last one. 0: one by one."""
    chunks = []
    for number, bucket in enumerate(plan.buckets):
        start, filled = 0, 0
        for i, member in enumerate(bucket.members):
            filled += parameters[member].nbytes
            last = i + 1 == len(bucket.members)
            if last or not chunk_bytes or (filled >= chunk_bytes and bucket.kind is Kind.FLAT):
                chunks.append(Chunk(number, start, i + 1, bucket.members[start : i + 1]))
                start, filled = i + 1, 0
    return chunks


# --- comparison between ranks ---------------------------------------------------------------------


def fingerprint(*things: object) -> int:
    """Return a checksum of the values, which is the same in every process."""
    return zlib.crc32(repr(things).encode())


def model_fingerprint(parameters: Sequence[ParameterInfo], options: Sequence[tuple[str, object]]) -> int:
    """Return a checksum of the model. It omits the device index, which may differ between ranks."""
    shapes = [(p.name, p.sizes, p.strides, p.dtype, kind_of_device(p), p.sparse) for p in parameters]
    return fingerprint(shapes, tuple(options))


def kind_of_device(facts: ParameterInfo) -> str:
    return facts.device.partition(":")[0]


def plan_fingerprint(plan: BucketPlan) -> int:
    return fingerprint([(bucket.members, bucket.kind.value) for bucket in plan.buckets])


def disagreement(
    described: Sequence[Sequence[ParameterInfo]], options: Sequence[Sequence[tuple[str, object]]]
) -> str:
    """Describe the first difference between the models of the ranks. Empty if there is none."""
    ours, settings = described[0], options[0]
    for rank, theirs in enumerate(described):
        if len(theirs) != len(ours):
            return (
                f"DDP expects same model across all ranks, but Rank 0 has {len(ours)} params, "
                f"while rank {rank} has inconsistent {len(theirs)} params. {_SAME_MODEL}"
            )
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if difference := _difference(a, b):
                return (
                    f"DDP verifies model across all ranks: parameter {b.name!r} (params[{i}]) of rank {rank} "
                    f"with {difference[1]} appears not to match {difference[0]} of the same param in process 0, "
                    f"{a.name!r} with {difference[2]}. {_SAME_MODEL}"
                )
        if elsewhere := _other_order([p.name for p in ours], [p.name for p in theirs], rank):
            return elsewhere
        for (option, a_value), (_, b_value) in zip(settings, options[rank], strict=True):
            if a_value != b_value:
                return (
                    f"DDP verifies model across all ranks: {option}={a_value} on rank 0, but {option}={b_value} on "
                    f"rank {rank}. Use the same value on all ranks."
                )
    return ""


def _other_order(ours: Sequence[str], theirs: Sequence[str], rank: int) -> str:
    """Describe a different order of the same names, which would average unrelated gradients.

    Ranks may use different names for their parameters. That is not an error.
    """
    if ours == theirs or sorted(ours) != sorted(theirs):
        return ""
    i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return (
        f"DDP verifies model across all ranks: params[{i}] is {ours[i]!r} on rank 0, but {theirs[i]!r} on rank {rank}. "
        "Create the layers in the same order on all ranks. Do not iterate over a Python set: its order differs."
    )


def first_unlike(states: Sequence[Sequence[Entry]]) -> str:
    """Describe the first tensor of rank 0's state that does not fit another rank. Empty if all fit."""
    ours = states[0]
    for rank, theirs in enumerate(states):
        for (name, *here), (other, *there) in zip(ours, theirs, strict=False):
            if here != there:
                return (
                    f"DDP cannot copy the state of rank 0 to all ranks: rank 0 has {name!r} ({here[1]} {here[0]}), but "
                    f"rank {rank} has {other!r} ({there[1]} {there[0]}) at the same position. {_SAME_MODEL}"
                )
        if len(ours) != len(theirs):
            more, where = (ours, 0) if len(ours) > len(theirs) else (theirs, rank)
            first = more[min(len(ours), len(theirs))][0]
            return (
                f"DDP cannot copy the state of rank 0 to all ranks: rank 0 has {len(ours)} parameters and buffers, "
                f"rank {rank} has {len(theirs)}. {first!r} exists only on rank {where}. {_SAME_MODEL}"
            )
    return ""


def _difference(a: ParameterInfo, b: ParameterInfo) -> tuple[str, str, str] | None:
    pairs: tuple[tuple[str, object, object], ...] = (
        ("sizes", list(a.sizes), list(b.sizes)),
        ("strides", list(a.strides), list(b.strides)),
        ("dtype", a.dtype, b.dtype),
        ("device", kind_of_device(a), kind_of_device(b)),
        ("kind of gradient", "sparse" if a.sparse else "dense", "sparse" if b.sparse else "dense"),
    )
    for what, at_first, here in pairs:
        if at_first != here:
            return what, f"{what} {here}", f"{what} {at_first}"
    return None
